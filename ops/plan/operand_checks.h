// Checks of an instruction's operands against the memory of its plan.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "linear/packed_panel.h"
#include "plan/plan.h"
#include "runtime/types.h"

namespace armllm {

// Sizes are doubles here: products of two of a program's integers do not fit 64 bits.
class Checks {
 public:
  explicit Checks(Bounds& bounds) : bounds_(bounds) {}

  // A row of `columns` elements of a floating-point type for each token; rows are `stride` apart.
  void rows(const View& view, double columns) const {
    if (view.space == Space::none) return;
    STD_TORCH_CHECK(view.type <= ElementType::f16, "plan: an operand must have a floating-point type");
    fits(view, view.column + columns, double(view.stride));
  }
  // Like rows, of `count` heads that are `stride` apart and are written.  They do not overlap, so the size of
  // the memory bounds their number, and with it the time of a step.
  void heads(const View& view, int64_t count, int64_t stride, int64_t columns) const {
    positive(count, "heads");
    positive(columns, "the size of a head");
    STD_TORCH_CHECK(count == 1 || stride >= columns, "plan: ", count, " heads of ", columns,
                    " elements overlap in the memory that an instruction writes: their stride is ", stride,
                    "; the plan is damaged: make it again");
    rows(view, (count - 1.0) * stride + columns);
  }
  // Like heads, whose columns are `step` apart: heads may lie between the columns of others.
  void grid(const View& view, int64_t count, int64_t stride, int64_t columns, int64_t step) const {
    positive(count, "heads");
    positive(columns, "the size of a head");
    const double one = (columns - 1.0) * step, all = (count - 1.0) * stride;
    const bool apart = (count == 1 || stride > 0) && (columns == 1 || step > 0) &&
                       (count == 1 || columns == 1 || stride > one || step > all);
    STD_TORCH_CHECK(apart, "plan: ", count, " heads of ", columns,
                    " elements overlap in the memory that an instruction writes: their stride is ", stride,
                    ", that of their elements ", step, "; the plan is damaged: make it again");
    rows(view, all + one + 1);
  }
  // Like rows, of float32; or one row for all tokens, which is a constant.
  void float_rows(const View& view, double columns) const {
    if (view.space == Space::none) return;
    STD_TORCH_CHECK(view.type == ElementType::f32, "plan: an operand must have the type float32");
    fits(view, view.column + columns, view.space == Space::constant ? 0 : double(view.stride));
  }
  // Like rows, of floats or of int64.
  void numbers(const View& view, double columns) const {
    if (view.type != ElementType::i64) return rows(view, columns);
    fits(view, view.column + columns, double(view.stride));
  }
  // The most elements that a row can hold whose size only the step's inputs tell.
  int64_t room(const View& view) const {
    needed(view, "rows");
    const bool in_arena = view.space == Space::arena || view.space == Space::shared;
    STD_TORCH_CHECK(in_arena || view.space == Space::output,
                    "plan: keys, values and results of attention must lie in the arena or in an output");
    rows(view, 1);
    if (!in_arena) return bounds_.output_bytes[view.index] / size_of(view.type) - view.column;
    return (arena_bytes(view) - view.index) / size_of(view.type) - view.column;
  }
  // `columns` adjacent elements a token, or that many altogether in a constant.
  void packed(const View& view, double columns, ElementType type) const {
    if (view.space == Space::none) return;
    STD_TORCH_CHECK(view.type == type,
                    "plan: an operand has another element type than its instruction needs");
    fits(view, view.column + columns, columns);
  }
  // `bytes` of a constant.
  void constant(const View& view, double bytes) const {
    if (view.space == Space::none) return;
    STD_TORCH_CHECK(view.space == Space::constant, "plan: a weight must be a constant");
    fits_bytes(view, double(view.column) * size_of(view.type) + bytes, 0);
  }
  void vector(const View& view, double elements, ElementType type) const {
    if (view.space == Space::none) return;
    STD_TORCH_CHECK(view.type == type, "plan: a weight has another element type than its instruction needs");
    constant(view, elements * size_of(type));
  }
  // A weight or bias of any floating-point type.
  void floats(const View& view, double elements) const {
    if (view.space == Space::none) return;
    STD_TORCH_CHECK(view.type <= ElementType::f16, "plan: a weight must have a floating-point type");
    constant(view, elements * size_of(view.type));
  }
  void table(const View& view, double count, double columns) const {
    STD_TORCH_CHECK(view.type <= ElementType::f16, "plan: a weight must have a floating-point type");
    constant(view, ((count - 1) * view.stride + columns) * size_of(view.type));
  }
  void panels(const View& view, double groups, double group_stride, double count, int64_t stride,
              Scheme scheme, int64_t in_features) const {
    const int64_t bytes = panel_layout(scheme, in_features).bytes;
    STD_TORCH_CHECK(stride >= bytes, "plan: panels of a weight overlap: their stride is ", stride,
                    ", a panel has ", bytes, " bytes");
    const double extent = (groups - 1) * group_stride + (count - 1) * double(stride) + double(bytes);
    const double total = groups * count * double(bytes);  // panels share no memory, which bounds `groups`
    constant(view, extent < total ? total : extent);
  }
  void needed(const View& view, const char* name) const {
    STD_TORCH_CHECK(view.space != Space::none, "plan: an instruction has no ", name);
  }
  // Operands that are written: weights and a step's inputs, once checked, stay as they are.
  void written(std::initializer_list<View> views) const {
    for (const View& view : views)
      STD_TORCH_CHECK(view.space != Space::constant && view.space != Space::input,
                      "plan: an instruction writes to a constant or to an input");
  }
  // Packed operands of which a kernel reads one back after it wrote the other.
  void disjoint(const View& a, const View& b, int64_t columns) const {
    if (a.space != b.space) return;
    const auto before = [columns](const View& x, const View& y) {
      return x.space == Space::arena && x.column == 0 && y.column == 0 &&
             x.index + columns * size_of(x.type) <= y.index;
    };
    STD_TORCH_CHECK((a.space == Space::output && a.index != b.index) || before(a, b) || before(b, a),
                    "plan: two results of an instruction overlap");
  }
  // Operands whose element type the kernel takes from one of them.
  void same_type(std::initializer_list<View> views) const {
    const View* first = nullptr;
    for (const View& view : views) {
      if (view.space == Space::none) continue;
      if (first == nullptr) first = &view;
      STD_TORCH_CHECK(view.type == first->type,
                      "plan: operands of an instruction have different element types");
    }
  }
  void input(const View& view, const char* name) const {
    STD_TORCH_CHECK(view.space == Space::input && view.column == 0, "plan: ", name, " must be an input");
    packed(view, 1, ElementType::i64);
  }
  // A program has one shared arena at most.
  void share(std::shared_ptr<Communicator> communicator, int64_t bytes_per_token) const {
    STD_TORCH_CHECK(bounds_.communicator == nullptr, "plan: ranks meet twice in a step");
    bounds_.communicator = std::move(communicator);
    bounds_.shared_bytes = bytes_per_token;
  }
  void shared_by(const std::shared_ptr<Communicator>& communicator) const {
    STD_TORCH_CHECK(bounds_.communicator == communicator, "plan: other ranks share the arena");
  }
  void cache(const CacheNeed& need) const { bounds_.needs.add(need); }
  void state(const StateNeed& need) const { bounds_.needs.add(need); }
  const char* data(const View& view) const {
    return bounds_.constants[view.index] + view.column * size_of(view.type);
  }
  void positive(int64_t value, const char* name) const {
    STD_TORCH_CHECK(value > 0, "plan: ", name, " is ", value, "; it must be positive");
  }

 private:
  // `first` elements up to the end of the first row, and `more` for each further token.
  void fits(const View& view, double first, double more) const {
    if (view.space == Space::input) {
      STD_TORCH_CHECK(first <= kMost && more <= kMost, "plan: rows of an input have ", first, " elements");
      bounds_.needs.add(RowsNeed{view.index, static_cast<int64_t>(first), static_cast<int64_t>(more)});
      return;
    }
    STD_TORCH_CHECK(view.space != Space::constant || more == 0,
                    "plan: a constant is read as rows of tokens, which it cannot have");
    fits_bytes(view, first * size_of(view.type), more * size_of(view.type));
  }
  void fits_bytes(const View& view, double bytes, double more) const {
    double room = 0, begin = 0;
    if (view.space == Space::constant) room = double(bounds_.constant_bytes[view.index]), more = 0;
    if (view.space == Space::output) room = double(bounds_.output_bytes[view.index]);
    if (view.space == Space::arena || view.space == Space::shared) {
      room = double(arena_bytes(view)), begin = double(view.index);
      STD_TORCH_CHECK(view.index % size_of(view.type) == 0, "plan: an operand is not aligned");
    }
    STD_TORCH_CHECK(begin + bytes <= room && begin + more <= room, "plan: an operand needs ", begin + bytes,
                    " bytes of a memory of ", room, ": the plan is damaged; make it again");
  }
  int64_t arena_bytes(const View& view) const {
    return view.space == Space::shared ? bounds_.shared_bytes : bounds_.arena_bytes;
  }
  static constexpr double kMost = double(int64_t{1} << 40);
  Bounds& bounds_;
};

}  // namespace armllm
