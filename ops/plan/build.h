// What the files of instructions share: an instruction from a task set and what points it at a step's data.
#pragma once

#include <memory>
#include <utility>

#include "plan/plan.h"

namespace armllm {

template <class Task, class Bind>
Instruction simple(std::unique_ptr<Task> task, Bind bind) {
  Task* raw = task.get();
  Instruction made;
  made.task = std::move(task);
  made.bind = [raw, bind](const Frame& frame) { bind(*raw, frame); };
  return made;
}

template <class Task, class Bind, class Bytes>
Instruction with_scratch(std::unique_ptr<Task> task, Bind bind, Bytes bytes) {
  Task* raw = task.get();
  Instruction made = simple(std::move(task), bind);
  made.scratch_bytes = [raw, bytes] { return bytes(raw->args); };
  made.set_scratch = [raw](void* scratch) { raw->args.scratch = scratch; };
  return made;
}

// latent.cpp
Instruction int8_heads_linear(Reader& in);
Instruction dense_heads_linear(Reader& in);
Instruction mla_write(Reader& in);
Instruction mla_attention(Reader& in);

}  // namespace armllm
