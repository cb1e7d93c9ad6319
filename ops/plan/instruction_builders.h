// Helpers that build an instruction from a task set and a bind function, which sets the addresses of a step's
// data.
#pragma once

#include <algorithm>
#include <memory>
#include <utility>

#include "attention/paged_attention.h"
#include "plan/instruction_fields.h"
#include "plan/plan.h"

namespace armllm {

template <class Task, class Bind>
Instruction simple(std::unique_ptr<Task> task, Bind bind) {
  Task* raw = task.get();
  Instruction instruction;
  instruction.task = std::move(task);
  instruction.bind = [raw, bind](const Frame& frame) { bind(*raw, frame); };
  return instruction;
}

template <class Task, class Bind, class Bytes>
Instruction with_scratch(std::unique_ptr<Task> task, Bind bind, Bytes bytes) {
  Task* raw = task.get();
  Instruction instruction = simple(std::move(task), bind);
  instruction.scratch_bytes = [raw, bytes] { return bytes(raw->args); };
  instruction.set_scratch = [raw](void* scratch) { raw->args.scratch = scratch; };
  return instruction;
}

// An upper bound of the sequence lengths.  It is rounded up to whole KV splits, so it stays the same for many
// steps and a replay remains valid.
template <class Args>
int64_t length_bound(const Args& a) {
  return a.sequences == 0 ? 0 : round_up(*std::max_element(a.seq_lens, a.seq_lens + a.sequences), kSplit);
}

// Sets the arguments that do not depend on the kind of cache: block table, query starts, lengths.
template <class Fields, class Args>
void bind_sequences(const Frame& frame, const Fields& op, Args& a) {
  a.block_table = static_cast<const int32_t*>(frame.input(op.block_table).data_ptr());
  a.block_table_stride = frame.input(op.block_table).size(1);
  a.query_start = static_cast<const int32_t*>(frame.input(op.query_start).data_ptr());
  a.seq_lens = static_cast<const int32_t*>(frame.input(op.seq_lens).data_ptr());
  a.sequences = frame.input(op.seq_lens).numel();
  a.max_seq_len = length_bound(a);
  a.tokens = frame.tokens;
}

// One `build` per instruction, defined in the *instructions.cpp of this folder.
#define INSTRUCTION(opcode, members) Instruction build(const fields::opcode& op);
#include "plan/instructions.def"

}  // namespace armllm
