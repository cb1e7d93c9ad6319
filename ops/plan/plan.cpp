// Plans, and the ops that create and run them.
#include "plan/plan.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <limits>
#include <new>
#include <unordered_map>
#include <utility>

#include "runtime/tensor_args.h"

namespace armllm {
namespace {

constexpr int64_t kAlignment = 64;
constexpr int64_t kOutputHeader = 3;

char* aligned(char* p) {
  return reinterpret_cast<char*>(round_up(reinterpret_cast<intptr_t>(p), kAlignment));
}

char* reserve(std::unique_ptr<char[]>& memory, int64_t& capacity, int64_t each, int64_t count) {
  constexpr int64_t kMost = int64_t{1} << 46;
  STD_TORCH_CHECK(each >= 0 && each <= kMost / count, "plan: a step needs ", count, " times ", each,
                  " bytes of memory");
  const int64_t bytes = each * count;
  if (bytes + kAlignment > capacity) {
    capacity = 0;  // in case there is no more memory
    memory.reset();
    capacity = 0;
    memory.reset(new (std::nothrow) char[bytes + kAlignment]);
    STD_TORCH_CHECK(memory != nullptr, "plan: there is no memory for the ", bytes, " bytes of a step");
    capacity = bytes + kAlignment;
  }
  return memory ? aligned(memory.get()) : nullptr;
}

ElementType element_type(int64_t number) {
  STD_TORCH_CHECK(number >= 0 && number <= static_cast<int64_t>(ElementType::i32),
                  "plan: unknown element type ", number);
  return static_cast<ElementType>(number);
}

// Elements from the first to the last one in memory.
int64_t extent(const Tensor& t) {
  if (t.numel() == 0) return 0;
  int64_t last = 0;
  for (int64_t d = 0; d < t.dim(); ++d) last += (t.size(d) - 1) * t.stride(d);
  return last + 1;
}

torch::headeronly::ScalarType scalar_type(ElementType type) {
  switch (type) {
    case ElementType::i64:
      return torch::headeronly::ScalarType::Long;
    case ElementType::i32:
      return torch::headeronly::ScalarType::Int;
    case ElementType::bf16:
      return torch::headeronly::ScalarType::BFloat16;
    case ElementType::f16:
      return torch::headeronly::ScalarType::Half;
    case ElementType::f32:
      return torch::headeronly::ScalarType::Float;
  }
  STD_TORCH_CHECK(false, "plan: unknown element type ", static_cast<int64_t>(type));
}

}  // namespace

char* Frame::address(const View& view) const {
  char* base = nullptr;
  switch (view.space) {
    case Space::none:
      return nullptr;
    case Space::arena:
      base = arena + view.index * tokens;
      break;
    case Space::shared:
      base = shared + view.index * tokens;
      break;
    case Space::constant:
      base = constants[view.index];
      break;
    case Space::input: {
      const Tensor& tensor = input(view.index);
      STD_TORCH_CHECK(tensor.numel() >= tokens && tensor.is_contiguous(), "plan: input ", view.index, " has ",
                      tensor.numel(), " elements for ", tokens,
                      " tokens; it must be contiguous with one element per token");
      STD_TORCH_CHECK(type_of(tensor) == scalar_type(view.type), "plan: input ", view.index,
                      " has another dtype than the program reads: ids and positions must be int64");
      base = static_cast<char*>(tensor.data_ptr());
      break;
    }
    case Space::output:
      base = static_cast<char*>(outputs[view.index].data_ptr());
      break;
  }
  return base + view.column * size_of(view.type);
}

int64_t Reader::integer() {
  STD_TORCH_CHECK(at_ < end_, "plan: an instruction has fewer integers than its opcode needs");
  return *at_++;
}

int64_t Reader::number(const char* name, int64_t least) {
  constexpr int64_t kMost = int64_t{1} << 40;
  const int64_t value = integer();
  STD_TORCH_CHECK(value >= least && value <= kMost, "plan: ", name, " is ", value, "; it must lie in ", least,
                  " … ", kMost);
  return value;
}

int64_t Reader::list_size(const char* name) {
  constexpr int64_t kMost = 64;
  const int64_t size = number(name, 0);
  STD_TORCH_CHECK(size <= kMost, "plan: a list of ", name, " has ", size, " records; it may have ", kMost);
  return size;
}

float Reader::real() {
  const int64_t index = integer(), count = static_cast<int64_t>(floats_->size());
  STD_TORCH_CHECK(index >= 0 && index < count, "plan: there is no float ", index, " of ", count);
  return static_cast<float>((*floats_)[index]);
}

View Reader::view() {
  View v;
  const int64_t space = number("the space of an operand", 0);
  STD_TORCH_CHECK(space <= static_cast<int64_t>(Space::shared), "plan: unknown space ", space);
  v.space = static_cast<Space>(space);
  v.index = number("the index of an operand", 0);
  v.column = number("the column of an operand", 0);
  v.stride = number("the stride of an operand", 0);
  v.type = element_type(integer());
  if (v.space == Space::constant || v.space == Space::output) {
    const bool constant = v.space == Space::constant;
    const size_t count = (constant ? bounds_->constant_bytes : bounds_->output_bytes).size();
    STD_TORCH_CHECK(v.index < static_cast<int64_t>(count), "plan: there is no ",
                    constant ? "constant " : "output ", v.index, " of ", count);
  }
  return v;
}

Plan::Plan(std::vector<Tensor> constants, const std::vector<int64_t>& program,
           const std::vector<double>& floats)
    : constants_(std::move(constants)) {
  Bounds bounds;
  for (const Tensor& constant : constants_) {
    STD_TORCH_CHECK(constant.defined() && constant.is_cpu(), "plan: constant ", addresses_.size(),
                    " must be a tensor in the memory of the CPU");
    addresses_.push_back(static_cast<char*>(constant.data_ptr()));
    bounds.constants.push_back(addresses_.back());
    bounds.constant_bytes.push_back(extent(constant) * static_cast<int64_t>(constant.element_size()));
  }
  Reader header(program.data(), static_cast<int64_t>(program.size()), floats, bounds);
  arena_bytes_per_token_ = bounds.arena_bytes = header.number("the size of the arena", 0);
  const int64_t outputs = header.number("the number of outputs", 0);
  for (int64_t i = 0; i < outputs; ++i) {
    const int64_t columns = header.number("the width of an output", 0);
    outputs_.push_back({columns, element_type(header.integer())});
    bounds.output_bytes.push_back(columns * size_of(outputs_.back().type));
  }
  const int64_t count = header.number("the number of instructions", 0);
  int64_t at = kOutputHeader + 2 * outputs;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t rest = static_cast<int64_t>(program.size()) - at - 2;
    STD_TORCH_CHECK(rest >= 0, "plan: the program ends in the middle of an instruction");
    const int64_t opcode = program[at], size = program[at + 1];
    STD_TORCH_CHECK(size >= 0 && size <= rest, "plan: the program ends in the middle of an instruction");
    Reader reader(program.data() + at + 2, size, floats, bounds);
    instructions_.push_back(decode(opcode, reader));
    STD_TORCH_CHECK(reader.done(), "plan: an instruction of opcode ", opcode,
                    " has more integers than its opcode needs");
    at += 2 + size;
  }
  needs_ = std::move(bounds.needs);
  shared_bytes_per_token_ = bounds.shared_bytes;
  communicator_ = std::move(bounds.communicator);
  for (Instruction& instruction : instructions_) {
    tasks_.push_back(instruction.task.get());
    if (instruction.still_valid) conditions_.push_back(&instruction.still_valid);
  }
}

std::vector<Tensor> Plan::new_outputs(const std::vector<Tensor>& inputs, int64_t tokens) const {
  STD_TORCH_CHECK(!inputs.empty() && tokens >= 0 && tokens <= std::numeric_limits<int32_t>::max(),
                  "plan: it cannot run ", tokens, " tokens with ", inputs.size(), " inputs");
  check_inputs(needs_, inputs, tokens);
  std::vector<Tensor> tensors;
  for (const Output& output : outputs_) {
    const int64_t sizes[2] = {tokens, output.columns};
    tensors.push_back(new_tensor(inputs[0], {sizes, 2}, scalar_type(output.type)));
  }
  return tensors;
}

void Plan::check_outputs(const std::vector<Tensor>& outputs, int64_t tokens) const {
  STD_TORCH_CHECK(outputs.size() == outputs_.size(), "plan: results must have ", outputs_.size(),
                  " tensors, one per output of the plan, but it has ", outputs.size(), " tensors");
  for (size_t i = 0; i < outputs.size(); ++i) {
    const Tensor& output = outputs[i];
    const bool fits = output.dim() == 2 && output.size(0) == tokens && output.size(1) == outputs_[i].columns;
    STD_TORCH_CHECK(fits && output.is_contiguous() && type_of(output) == scalar_type(outputs_[i].type),
                    "plan: results[", i, "] must be contiguous, have shape (", tokens, ", ",
                    outputs_[i].columns, ") and the dtype of the plan's output");
  }
}

void Plan::bind(const std::vector<Tensor>& inputs, std::vector<Tensor> outputs, int64_t tokens) {
  binding_ = 0;
  team_ = team_size();
  variant_ = &variant();
  Frame frame;
  frame.tokens = tokens;
  frame.constants = addresses_.data();
  frame.inputs = &inputs;
  frame.outputs = std::move(outputs);
  if (tokens == 0) return;
  values_ = check_step(needs_, inputs, tokens);
  frame.arena = reserve(arena_, arena_capacity_, arena_bytes_per_token_, tokens);
  if (communicator_ != nullptr) {
    STD_TORCH_CHECK(shared_bytes_per_token_ <= communicator_->shared_bytes() / tokens, "plan: a step of ",
                    tokens, " tokens needs ", shared_bytes_per_token_, " bytes a token of the ",
                    communicator_->shared_bytes(), " that ranks share: set max_num_batched_tokens lower");
    frame.shared = communicator_->shared();
  }
  int64_t scratch = 0;
  for (Instruction& instruction : instructions_) {
    instruction.bind(frame);
    if (instruction.scratch_bytes) scratch = std::max(scratch, instruction.scratch_bytes());
  }
  void* shared = reserve(scratch_, scratch_capacity_, scratch, 1);
  for (Instruction& instruction : instructions_)
    if (instruction.set_scratch) instruction.set_scratch(shared);
}

bool Plan::is_binding_valid() const {
  if (team_ != team_size() || variant_ != &variant() || !are_valid(values_)) return false;
  return std::all_of(conditions_.begin(), conditions_.end(),
                     [](const auto* still_valid) { return (*still_valid)(); });
}

std::vector<Tensor> Plan::run(const std::vector<Tensor>& inputs, int64_t tokens, TaskTime* times) {
  std::lock_guard<std::mutex> lock(running_);
  std::vector<Tensor> outputs = new_outputs(inputs, tokens);
  bind(inputs, outputs, tokens);
  if (tokens != 0) run_timed(tasks_.data(), size(), times);
  return outputs;
}

int64_t Plan::run_then(Plan& next, const std::vector<Tensor>& inputs, const std::vector<Tensor>& results,
                       int64_t tokens) {
  static std::atomic<int64_t> bindings{0};
  STD_TORCH_CHECK(&next != this, "plan_run_then needs two different plans");
  STD_TORCH_CHECK(
      next.needs_.caches.empty(),
      "plan_run_then: the second plan must not use a cache: its slots are unknown before it runs");
  STD_TORCH_CHECK(tokens > 0, "plan: a step has ", tokens, " tokens, but needs at least 1");
  std::scoped_lock lock(running_, next.running_);
  if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
  next.check_outputs(results, tokens);
  intermediates_ = new_outputs(inputs, tokens);
  bind(inputs, intermediates_, tokens);
  check_inputs(next.needs_, intermediates_, tokens);
  next.bind(intermediates_, results, tokens);
  combined_tasks_ = tasks_;
  combined_tasks_.insert(combined_tasks_.end(), next.tasks_.begin(), next.tasks_.end());
  binding_ = next.binding_ = ++bindings;
  armllm::run(combined_tasks_.data(), static_cast<int64_t>(combined_tasks_.size()));
  return binding_;
}

bool Plan::replay(Plan& next, int64_t binding, TaskTime* times) {
  std::scoped_lock lock(running_, next.running_);
  if (binding == 0 || binding_ != binding || next.binding_ != binding) return false;
  if (!is_binding_valid() || !next.is_binding_valid()) return false;
  try {
    run_timed(combined_tasks_.data(), static_cast<int64_t>(combined_tasks_.size()), times);
  } catch (...) {
    failure_ = std::current_exception();
    throw;
  }
  return true;
}

namespace {

std::mutex plans_mutex;
std::unordered_map<int64_t, std::shared_ptr<Plan>>& plans() {
  static auto* all = new std::unordered_map<int64_t, std::shared_ptr<Plan>>();
  return *all;
}

int64_t plan_create(std::vector<Tensor> constants, std::vector<int64_t> program, std::vector<double> floats) {
  static int64_t next = 1;
  auto plan = std::make_shared<Plan>(std::move(constants), program, floats);
  std::lock_guard<std::mutex> lock(plans_mutex);
  plans()[next] = std::move(plan);
  return next++;
}

std::shared_ptr<Plan> plan_of(int64_t handle) {
  std::lock_guard<std::mutex> lock(plans_mutex);
  const auto entry = plans().find(handle);
  STD_TORCH_CHECK(entry != plans().end(), "there is no plan with handle ", handle);
  return entry->second;
}

std::vector<Tensor> plan_run(int64_t handle, std::vector<Tensor> inputs, int64_t tokens) {
  return plan_of(handle)->run(inputs, tokens);
}

int64_t plan_run_then(int64_t handle, int64_t next, std::vector<Tensor> inputs, std::vector<Tensor> results,
                      int64_t tokens) {
  return plan_of(handle)->run_then(*plan_of(next), inputs, results, tokens);
}

// Writes an array (instructions + 2, 3) of nanoseconds.  Columns of an instruction's row: elapsed time, time
// in its tiles summed over all threads, and time since the previous instruction.  In the last two rows,
// column 0 is the time before the first and after the last instruction, and column 1 is the clock at the
// begin and at the end.
void tabulate(const std::vector<TaskTime>& times, Nanoseconds began, Nanoseconds ended, int64_t* row) {
  Nanoseconds last = times.empty() ? began : times[0].began.load();
  const Nanoseconds before = last - began;
  for (const TaskTime& time : times) {
    row[0] = time.ended - time.began;
    row[1] = time.worked;
    row[2] = time.began - last;
    last = time.ended;
    row += 3;
  }
  row[0] = before;
  row[1] = began;
  row[3] = ended - last;
  row[4] = ended;
}

Tensor plan_profile(int64_t handle, std::vector<Tensor> inputs, int64_t tokens) {
  const std::shared_ptr<Plan> plan = plan_of(handle);
  const int64_t count = plan->size(), sizes[2] = {count + 2, 3};
  std::vector<TaskTime> times(count);
  const Nanoseconds began = monotonic_time();
  plan->run(inputs, tokens, times.data());
  const Nanoseconds ended = monotonic_time();
  Tensor table = torch::stable::new_zeros(inputs.at(0), {sizes, 2}, torch::headeronly::ScalarType::Long);
  tabulate(times, began, ended, static_cast<int64_t*>(table.data_ptr()));
  return table;
}

bool replay(int64_t handle, int64_t next, int64_t binding, int64_t* table) {
  if (table == nullptr) return plan_of(handle)->replay(*plan_of(next), binding, nullptr);
  const Nanoseconds began = monotonic_time();
  const std::shared_ptr<Plan> plan = plan_of(handle), following = plan_of(next);
  std::vector<TaskTime> times(plan->size() + following->size());
  if (!plan->replay(*following, binding, times.data())) return false;
  tabulate(times, began, monotonic_time(), table);
  return true;
}

void plan_free(int64_t handle) {
  std::lock_guard<std::mutex> lock(plans_mutex);
  plans().erase(handle);
}

}  // namespace
}  // namespace armllm

// Returns true if the step was replayed.  `table` is null, or memory for the times of both plans'
// instructions (see tabulate).  This is a C function instead of an op, because it needs no tensors.  With
// cold caches, torch's dispatcher costs as much as all other overhead of a small model's step.
extern "C" __attribute__((visibility("default"))) bool armllm_plan_replay(int64_t handle, int64_t next,
                                                                          int64_t binding,
                                                                          int64_t* table) noexcept {
  try {
    return armllm::replay(handle, next, binding, table);
  } catch (...) {  // the caller then uses plan_run_then, which reports the error
    return false;
  }
}

// Frees a plan without the dispatcher: a plan may be collected while a graph is traced, which would record
// the op.
extern "C" __attribute__((visibility("default"))) void armllm_plan_free(int64_t handle) noexcept {
  try {
    armllm::plan_free(handle);
  } catch (...) {  // there is no such plan
  }
}

STABLE_TORCH_LIBRARY_IMPL(armllm, CompositeExplicitAutograd, m) {
  m.impl("plan_create", TORCH_BOX(&armllm::plan_create));
  m.impl("plan_free", TORCH_BOX(&armllm::plan_free));
}

STABLE_TORCH_LIBRARY_IMPL(armllm, CPU, m) {
  m.impl("plan_run", TORCH_BOX(&armllm::plan_run));
  m.impl("plan_run_then", TORCH_BOX(&armllm::plan_run_then));
  m.impl("plan_profile", TORCH_BOX(&armllm::plan_profile));
}
