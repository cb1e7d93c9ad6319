// A model step as a list of instructions that run without Python.
//
// A program is a flat list of integers, encoded by torch_armllm/plan/program.py, and a list of floats that it
// refers to:
//
//   arena bytes per token, number of outputs, {columns, type} of each output, number of instructions,
//   then each instruction: opcode, number of integers, integers …    (instructions.def)
//
// Every activation is rows of tokens in one arena.  Its location is a byte offset per token: offsets scale
// with the number of tokens, and the arena's layout is fixed when the program is encoded.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "dispatch/variants.h"
#include "runtime/task_times.h"
#include "runtime/types.h"

namespace armllm {

using torch::stable::Tensor;

enum class Space : int64_t {
#define SPACE(name, number) name = number,
#include "runtime/enums.def"
};

// The types of DType with the same numbers, and those of ids.
enum class ElementType : int64_t {
#define DTYPE(name, number, torch_name) name = number,
#define INDEX_TYPE(name, number, torch_name) name = number,
#include "runtime/enums.def"
};

inline int64_t size_of(ElementType type) {
  if (type == ElementType::i64) return 8;
  return type == ElementType::i32 ? 4 : size_of(static_cast<DType>(type));
}

// Location of an operand, as five integers.
struct View {
  Space space = Space::none;
  int64_t index = 0;   // byte offset per token in the arena; else the number of a constant, input or output
  int64_t column = 0;  // first column, in elements
  int64_t stride = 0;  // elements from one row to the next
  ElementType type = ElementType::f32;

  DType dtype() const { return static_cast<DType>(type); }
};

// The data of one step, from which operands get their addresses.
struct Frame {
  int64_t tokens = 0;
  char* arena = nullptr;
  char* const* constants = nullptr;
  const std::vector<Tensor>* inputs = nullptr;
  std::vector<Tensor> outputs;

  char* address(const View& view) const;
  Rows rows(const View& view) const { return Rows{address(view), view.stride, view.dtype()}; }
  template <class T>
  T* pointer(const View& view) const {
    return reinterpret_cast<T*>(address(view));
  }
  const Tensor& input(int64_t index) const {
    STD_TORCH_CHECK(index >= 0 && index < static_cast<int64_t>(inputs->size()), "plan: there is no input ",
                    index, " of ", inputs->size());
    return (*inputs)[index];
  }
};

// Reads a program's integers in order.
class Reader {
 public:
  Reader(const int64_t* integers, int64_t count, const std::vector<double>& floats)
      : at_(integers), end_(integers + count), floats_(&floats) {}
  int64_t integer();
  float real() { return static_cast<float>((*floats_)[integer()]); }
  View view();
  bool done() const { return at_ == end_; }

 private:
  const int64_t* at_;
  const int64_t* end_;
  const std::vector<double>* floats_;
};

struct Instruction {
  std::unique_ptr<TaskSet> task;
  // Points the task set at a step's data.
  std::function<void(const Frame&)> bind;
  // True if what bind derived from the values of its inputs fits their present values.  Empty: bind derived
  // nothing.
  std::function<bool()> still_valid;
  // Bytes of scratch for this step, called after bind.  Empty: none.
  std::function<int64_t()> scratch_bytes;
  std::function<void(void*)> set_scratch;
};

Instruction decode(int64_t opcode, Reader& reader);

class Plan {
 public:
  Plan(std::vector<Tensor> constants, const std::vector<int64_t>& program, const std::vector<double>& floats);
  // `times`: one element per instruction, or null.
  std::vector<Tensor> run(const std::vector<Tensor>& inputs, int64_t tokens, TaskTime* times = nullptr);
  // Runs this plan and then `next`, whose inputs are this plan's outputs, with one start of the threads.  The
  // outputs of `next` go to `results`.  Returns a binding id for `replay`.
  int64_t run_then(Plan& next, const std::vector<Tensor>& inputs, const std::vector<Tensor>& results,
                   int64_t tokens);
  // Repeats a `run_then` on the same memory with new values in it.  Binding touches every instruction, and
  // after a step no cache holds them; a replay skips it.  Returns false and does nothing if either plan has
  // run another step meanwhile, or if the values need other sizes.  `times`: one element per instruction of
  // both plans, or null.
  bool replay(Plan& next, int64_t binding, TaskTime* times);
  int64_t size() const { return static_cast<int64_t>(tasks_.size()); }

 private:
  struct Output {
    int64_t columns;
    ElementType type;
  };
  std::vector<Tensor> new_outputs(const Tensor& like, int64_t tokens) const;
  void check_outputs(const std::vector<Tensor>& outputs, int64_t tokens) const;
  // Points all instructions at a step's data.
  void bind(const std::vector<Tensor>& inputs, std::vector<Tensor> outputs, int64_t tokens);
  bool is_binding_valid() const;

  std::vector<Tensor> constants_;
  std::vector<char*> addresses_;  // of the constants: asking each tensor in each step would miss all caches
  std::vector<Output> outputs_;
  std::vector<Instruction> instructions_;
  std::vector<TaskSet*> tasks_;
  std::vector<const std::function<bool()>*> conditions_;  // still_valid of the instructions that have it
  int64_t arena_bytes_per_token_ = 0;
  std::unique_ptr<char[]> arena_, scratch_;
  int64_t arena_capacity_ = 0, scratch_capacity_ = 0;
  int64_t binding_ = 0;  // id of the instructions' present binding; 0: none that can be replayed
  int64_t team_ = 0;     // team size of that binding
  const Variant* variant_ = nullptr;
  std::vector<Tensor> intermediates_;     // this plan's outputs that the next plan reads
  std::vector<TaskSet*> combined_tasks_;  // of this plan and the next one
  std::mutex running_;
};

}  // namespace armllm
