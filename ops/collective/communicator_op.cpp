// The open communicators, the ops that open, use and close them, and the waits of ranks for messages.
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <mutex>
#include <unordered_map>

#include "collective/communicators.h"
#include "collective/gather_columns.h"
#include "runtime/pause_cpu.h"
#include "runtime/task_times.h"
#include "runtime/tensor_args.h"

namespace armllm {
namespace {

// A communicator that keeps its memory.
struct OpenCommunicator {
  OpenCommunicator(Tensor memory, Communicator communicator)
      : memory(std::move(memory)), communicator(communicator) {}
  Tensor memory;
  Communicator communicator;
};

std::mutex communicators_mutex;
std::unordered_map<int64_t, std::shared_ptr<OpenCommunicator>>& communicators() {
  static auto* all = new std::unordered_map<int64_t, std::shared_ptr<OpenCommunicator>>();
  return *all;
}

int64_t communicator_open(Tensor memory, int64_t rank, int64_t ranks, int64_t buffer_bytes,
                          int64_t timeout_ms, std::vector<int64_t> sockets) {
  static int64_t next = 1;
  STD_TORCH_CHECK(ranks >= 1 && ranks <= kMaxCommunicatorRanks && rank >= 0 && rank < ranks,
                  "communicator_open: there is no rank ", rank, " of ", ranks, "; there may be ",
                  kMaxCommunicatorRanks);
  STD_TORCH_CHECK(buffer_bytes > 0 && buffer_bytes % 64 == 0 && buffer_bytes <= (int64_t{1} << 40),
                  "communicator_open: buffers of ", buffer_bytes, " bytes; they must be whole lines of 64");
  STD_TORCH_CHECK(type_of(memory) == ScalarType::Byte && memory.is_contiguous() &&
                      memory.numel() >= Communicator::bytes(ranks, buffer_bytes) &&
                      reinterpret_cast<intptr_t>(memory.data_ptr()) % 64 == 0,
                  "communicator_open: memory must be ", Communicator::bytes(ranks, buffer_bytes),
                  " bytes (uint8) that begin on a line of 64");
  STD_TORCH_CHECK(sockets.empty() || int64_t(sockets.size()) == ranks, "communicator_open: ", sockets.size(),
                  " sockets for ", ranks, " ranks");
  const int64_t timeout_ns = timeout_ms * 1000000;
  std::shared_ptr<const NetworkLinks> network;
  if (!sockets.empty()) network = std::make_shared<const NetworkLinks>(std::move(sockets), rank, timeout_ns);
  const int64_t shared_bytes =
      network != nullptr ? 0 : memory.numel() - Communicator::bytes(ranks, buffer_bytes);
  const Communicator communicator(static_cast<char*>(memory.data_ptr()), rank, ranks, buffer_bytes,
                                  shared_bytes, timeout_ns, std::move(network));
  const std::lock_guard lock(communicators_mutex);
  communicators()[next] = std::make_shared<OpenCommunicator>(std::move(memory), communicator);
  return next++;
}

void communicator_close(int64_t handle) {
  const std::lock_guard lock(communicators_mutex);
  communicators().erase(handle);
}

Tensor gather_columns(Tensor given_x, int64_t handle, std::vector<int64_t> columns) {
  const Tensor x = as_rows(given_x);
  GatherColumns gather;
  GatherArgs& args = gather.args;
  args.communicator = communicator_of(handle);
  const int64_t ranks = args.communicator->ranks(), rank = args.communicator->rank();
  STD_TORCH_CHECK(int64_t(columns.size()) == ranks, "gather_columns: ", columns.size(), " sizes for ", ranks,
                  " ranks");
  int64_t all = 0;
  for (const int64_t each : columns) {
    STD_TORCH_CHECK(each > 0, "gather_columns: a rank has ", each, " columns; it needs at least one");
    all += each;
  }
  STD_TORCH_CHECK(x.dim() >= 1 && last_size(x) == columns[rank], "gather_columns: x has the shape ",
                  shape_of(x), "; rank ", rank, " has ", columns[rank], " columns");
  std::vector<int64_t> sizes;
  for (int64_t d = 0; d + 1 < x.dim(); ++d) sizes.push_back(x.size(d));
  sizes.push_back(all);
  Tensor out = new_tensor(x, {sizes.data(), sizes.size()});
  args.x = rows_of(x, "x");
  args.out = rows_of(out, "out");
  args.rows = row_count(x);
  args.columns = std::move(columns);
  run(gather);
  return out;
}

}  // namespace

std::shared_ptr<Communicator> communicator_of(int64_t handle) {
  const std::lock_guard lock(communicators_mutex);
  const auto entry = communicators().find(handle);
  STD_TORCH_CHECK(entry != communicators().end(), "there is no communicator with handle ", handle);
  return {entry->second, &entry->second->communicator};
}

}  // namespace armllm

// Waits until a counter in memory that processes share is at least `value`; returns the counter.  It returns
// earlier after `timeout_ms`.  The first `spin_ns` keep the core; then the thread sleeps until it is woken.
extern "C" __attribute__((visibility("default"))) int64_t armllm_wait_at_least(int64_t* counter,
                                                                               int64_t value, int64_t spin_ns,
                                                                               int64_t timeout_ms) noexcept {
  auto& shared = *reinterpret_cast<std::atomic<int64_t>*>(counter);
  const armllm::Nanoseconds began = armllm::monotonic_time();
  int64_t seen = shared.load(std::memory_order_acquire);
  while (seen < value) {
    const armllm::Nanoseconds waited = armllm::monotonic_time() - began;
    if (waited >= timeout_ms * 1000000) return seen;
    if (waited < spin_ns) {
      for (int i = 0; i < 32; ++i) armllm::pause_cpu();
    } else {
      // The low half of the counter, which changes with every message, is what the kernel compares.
      const armllm::Nanoseconds left = timeout_ms * 1000000 - waited;
      const timespec limit{left / 1000000000, left % 1000000000};
      syscall(SYS_futex, reinterpret_cast<int32_t*>(counter), FUTEX_WAIT, int32_t(seen), &limit, nullptr, 0);
    }
    seen = shared.load(std::memory_order_acquire);
  }
  return seen;
}

// Sets a counter and wakes the threads that wait for it.
extern "C" __attribute__((visibility("default"))) void armllm_post(int64_t* counter, int64_t value) noexcept {
  reinterpret_cast<std::atomic<int64_t>*>(counter)->store(value, std::memory_order_release);
  syscall(SYS_futex, reinterpret_cast<int32_t*>(counter), FUTEX_WAKE, 1 << 30, nullptr, nullptr, 0);
}

STABLE_TORCH_LIBRARY_IMPL(armllm, CompositeExplicitAutograd, m) {
  m.impl("communicator_open", TORCH_BOX(&armllm::communicator_open));
  m.impl("communicator_close", TORCH_BOX(&armllm::communicator_close));
}

STABLE_TORCH_LIBRARY_IMPL(armllm, CPU, m) { m.impl("gather_columns", TORCH_BOX(&armllm::gather_columns)); }
