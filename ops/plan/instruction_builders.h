// What the files of instructions share: an instruction from a task set and what points it at a step's data.
#pragma once

#include <algorithm>
#include <memory>
#include <utility>

#include "attention/paged_attention.h"
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

// A bound of the lengths of the sequences that stays for as many steps as it can: attention goes by whole splits.
inline int64_t length_bound(const AttentionArgs& a) {
  return a.sequences == 0 ? 0 : round_up(*std::max_element(a.seq_lens, a.seq_lens + a.sequences), kSplit);
}

// mla_instructions.cpp
Instruction int8_heads_linear(Reader& in);
Instruction dense_heads_linear(Reader& in);
Instruction mla_write(Reader& in);
Instruction mla_attention(Reader& in);

}  // namespace armllm
