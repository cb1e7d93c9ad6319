// A model step as a list of instructions that run without Python.
//
// A program is a flat list of integers, encoded by torch_armllm/plan/program.py, and a list of floats, to
// which the integers refer by index:
//
//   arena bytes per token, number of outputs, {columns, type} of each output, number of instructions,
//   then each instruction: opcode, number of integers, integers …    (instructions.def)
//
// All activations lie in one arena, as rows of tokens.  The location of an activation is a byte offset per
// token.  Offsets are multiplied by the number of tokens, so the arena's layout is fixed when the program is
// encoded.  Tensor parallel ranks of a machine have a second arena, which they share: each writes its columns
// of rows that all of them read.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "collective/communicator.h"
#include "dispatch/variants.h"
#include "plan/step_checks.h"
#include "runtime/task_times.h"
#include "runtime/types.h"

namespace armllm {

using torch::stable::Tensor;

enum class Space : int64_t {
#define SPACE(name, number) name = number,
#include "runtime/enums.def"
};

// The types of DType, with the same numbers, and the types of ids.
enum class ElementType : int64_t {
#define DTYPE(name, number, torch_name) name = number,
#define INDEX_TYPE(name, number, torch_name) name = number,
#include "runtime/enums.def"
};

inline int64_t size_of(ElementType type) {
  if (type == ElementType::i64) return 8;
  return type == ElementType::i32 ? 4 : size_of(static_cast<DType>(type));
}

// Location of an operand; a program encodes it as five integers.
struct View {
  Space space = Space::none;
  int64_t index = 0;   // arenas: byte offset per token; else the index of a constant, input or output
  int64_t column = 0;  // first column, in elements
  int64_t stride = 0;  // elements from one row to the next
  ElementType type = ElementType::f32;

  DType dtype() const { return static_cast<DType>(type); }
};

// The data of one step; resolves views to addresses.
struct Frame {
  int64_t tokens = 0;
  char* arena = nullptr;
  char* shared = nullptr;
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
    STD_TORCH_CHECK(index >= 0 && index < static_cast<int64_t>(inputs->size()), "plan: it reads input ",
                    index, ", but the number of inputs is ", inputs->size());
    return (*inputs)[index];
  }
};

// Sizes of the memory that operands lie in; those of the arenas and of outputs are bytes per token.
struct Bounds {
  int64_t arena_bytes = 0;
  int64_t shared_bytes = 0;
  std::shared_ptr<Communicator> communicator;  // of the shared arena
  std::vector<int64_t> constant_bytes, output_bytes;
  std::vector<const char*> constants;
  StepNeeds needs;  // what instructions need of a step's inputs, whose sizes are unknown before it
};

// Reads a program's integers in order, and checks that they are in range.
class Reader {
 public:
  Reader(const int64_t* integers, int64_t count, const std::vector<double>& floats, Bounds& bounds)
      : at_(integers), end_(integers + count), floats_(&floats), bounds_(&bounds) {}
  int64_t integer();
  // An integer from `least` to 2^40: sums of two and sizes in bytes fit 64 bits.
  int64_t number(const char* name, int64_t least);
  // The number of records of a list.
  int64_t list_size(const char* name);
  float real();
  View view();
  Bounds& bounds() const { return *bounds_; }
  bool done() const { return at_ == end_; }

 private:
  const int64_t* at_;
  const int64_t* end_;
  const std::vector<double>* floats_;
  Bounds* bounds_;
};

struct Instruction {
  std::unique_ptr<TaskSet> task;
  // Sets the task set's addresses and sizes for a step.
  std::function<void(const Frame&)> bind;
  // True if the values that bind derived from the contents of its inputs hold for the current contents.
  // Empty if bind derived none.
  std::function<bool()> still_valid;
  // Bytes of scratch memory for this step, called after bind.  Empty if the instruction needs none.
  std::function<int64_t()> scratch_bytes;
  std::function<void(void*)> set_scratch;
};

Instruction decode(int64_t opcode, Reader& reader);

class Plan {
 public:
  Plan(std::vector<Tensor> constants, const std::vector<int64_t>& program, const std::vector<double>& floats);
  // `times`: one element per instruction, or null.
  std::vector<Tensor> run(const std::vector<Tensor>& inputs, int64_t tokens, TaskTime* times = nullptr);
  // Runs this plan and then `next`, whose inputs are this plan's outputs, in one fork and join of the
  // threads. Writes the outputs of `next` to `results`.  Returns a binding id for `replay`.
  int64_t run_then(Plan& next, const std::vector<Tensor>& inputs, const std::vector<Tensor>& results,
                   int64_t tokens);
  // Repeats a `run_then` on the same memory, which may hold new values.  A replay skips binding, which would
  // read every instruction from memory because a step evicts them from the caches.  Returns false and does
  // nothing if either plan has run another step since, or if the new values need other sizes.  `times`: one
  // element per instruction of both plans, or null.
  bool replay(Plan& next, int64_t binding, TaskTime* times);
  int64_t size() const { return static_cast<int64_t>(tasks_.size()); }

 private:
  struct Output {
    int64_t columns;
    ElementType type;
  };
  // Checks the sizes of `inputs` too.
  std::vector<Tensor> new_outputs(const std::vector<Tensor>& inputs, int64_t tokens) const;
  void check_outputs(const std::vector<Tensor>& outputs, int64_t tokens) const;
  // Binds all instructions to a step's data.
  void bind(const std::vector<Tensor>& inputs, std::vector<Tensor> outputs, int64_t tokens);
  bool is_binding_valid() const;

  std::vector<Tensor> constants_;
  std::vector<char*> addresses_;  // of the constants, because reading each tensor would miss all caches
  std::vector<Output> outputs_;
  StepNeeds needs_;
  StepValues values_;  // of the current binding
  std::vector<Instruction> instructions_;
  std::vector<TaskSet*> tasks_;
  std::vector<const std::function<bool()>*> conditions_;  // still_valid of the instructions that have it
  int64_t arena_bytes_per_token_ = 0;
  int64_t shared_bytes_per_token_ = 0;
  std::shared_ptr<Communicator> communicator_;
  std::unique_ptr<char[]> arena_, scratch_;
  int64_t arena_capacity_ = 0, scratch_capacity_ = 0;
  std::exception_ptr failure_;  // of a replay; the next run_then reports it
  int64_t binding_ = 0;         // id of the instructions' current binding; 0: cannot be replayed
  int64_t team_ = 0;            // team size of that binding
  const Variant* variant_ = nullptr;
  std::vector<Tensor> intermediates_;     // this plan's outputs, which the next plan reads
  std::vector<TaskSet*> combined_tasks_;  // task sets of this plan and the next plan
  std::mutex running_;
};

}  // namespace armllm
