// A model step as a list of instructions that run without Python.
//
// A program is a flat list of integers, written by torch_armllm/plan/make.py, and a list of floats that it refers to:
//
//   arena bytes per token, number of outputs, {columns, type} of each output, number of instructions,
//   then each instruction: opcode, number of integers, integers …
//
// Every activation is rows of tokens in one arena; its place is a byte offset per token, so that offsets scale
// with the number of tokens and the arena's layout is fixed when the program is written.
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

enum class Space : int64_t { none = 0, arena = 1, constant = 2, input = 3, output = 4 };

// Where an operand lies, as five integers: space, index (byte offset per token in the arena), first column and
// row stride in elements, type (DType, or 3 for int64, 4 for int32).
struct View {
  Space space = Space::none;
  int64_t index = 0, column = 0, stride = 0, type = 0;
};

// What changes from step to step.
struct Frame {
  int64_t tokens = 0;
  char* arena = nullptr;
  char* const* constants = nullptr;
  const std::vector<Tensor>* inputs = nullptr;
  std::vector<Tensor> outputs;
  void* scratch = nullptr;

  char* address(const View& view) const;
  Rows rows(const View& view) const {
    return Rows{address(view), view.stride, static_cast<DType>(view.type)};
  }
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
  // Points the task set at this step's data.
  std::function<void(const Frame&)> bind;
  // Whether what bind took from the values of its inputs fits those that stand there now.  Empty: it took none.
  std::function<bool()> fits;
  // Bytes of scratch that it needs this step; asked after bind.  Empty: none.
  std::function<int64_t()> scratch_bytes;
  std::function<void(void*)> set_scratch;
};

Instruction decode(int64_t opcode, Reader& reader);

class Plan {
 public:
  Plan(std::vector<Tensor> constants, const std::vector<int64_t>& program, const std::vector<double>& floats);
  // `times`: of each instruction, or null.
  std::vector<Tensor> run(const std::vector<Tensor>& inputs, int64_t tokens, TaskTime* times = nullptr);
  // Runs this plan and then another one, whose inputs are this one's outputs, by one start of the threads.  What the
  // other one gives is written to `results`.  Returns a ticket for `run_again`.
  int64_t run_then(Plan& next, const std::vector<Tensor>& inputs, const std::vector<Tensor>& results,
                   int64_t tokens);
  // Does once more what `run_then` did, on the same memory with other values in it.  To point all instructions at a
  // step's data touches every one of them, and no cache holds them behind a step's weights.  False: nothing was
  // done, since another step has run meanwhile or these values need other sizes.
  // `times`: of each instruction of both, or null.
  bool run_again(Plan& next, int64_t ticket, TaskTime* times);
  int64_t size() const { return static_cast<int64_t>(tasks_.size()); }

 private:
  struct Output {
    int64_t columns, type;  // type as in View
  };
  std::vector<Tensor> new_outputs(const Tensor& like, int64_t tokens) const;
  void check_outputs(const std::vector<Tensor>& given, int64_t tokens) const;
  // Points all instructions at a step's data.
  void bind(const std::vector<Tensor>& inputs, std::vector<Tensor> outputs, int64_t tokens);
  bool fits() const;

  std::vector<Tensor> constants_;
  std::vector<char*> addresses_;  // of the constants: to ask each tensor in each step would miss all caches
  std::vector<Output> outputs_;
  std::vector<Instruction> instructions_;
  std::vector<TaskSet*> tasks_;
  std::vector<const std::function<bool()>*> conditions_;  // of the instructions that have some
  int64_t arena_bytes_per_token_ = 0;
  std::unique_ptr<char[]> arena_, scratch_;
  int64_t arena_capacity_ = 0, scratch_capacity_ = 0;
  int64_t ticket_ = 0;  // of what the instructions point at; 0: nobody may ask for it again
  int64_t team_ = 0;    // that they were bound for
  const Variant* variant_ = nullptr;
  std::vector<Tensor> between_;   // this plan's outputs that another one goes on with
  std::vector<TaskSet*> joined_;  // of this plan and the other one
  std::mutex running_;
};

}  // namespace armllm
