// The memory that the ranks of a tensor parallel group share, and the order of their exchanges.
//
// All ranks run the same instructions, so their exchanges have the same numbers.  A rank writes its part to
// its own buffer and publishes the exchange's number; the others wait for the number and read the buffer.
// Each rank has two buffers that exchanges use by turns: when a rank begins exchange n, it has seen the
// others publish n - 1, hence they have read its part of n - 2.  There is no further barrier.
//
// Layout of the memory, in lines of 64 bytes: the number of the rank that failed plus 1, or 0; the number of
// each rank's latest exchange; each rank's two buffers; a plan's shared arena.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "collective/network_links.h"
#include "runtime/types.h"

namespace armllm {

constexpr int64_t kMaxCommunicatorRanks = 64;

class Communicator {
 public:
  // `memory` is aligned to a cache line, and 0 in a new group.  `network` is null for ranks that share it.
  Communicator(char* memory, int64_t rank, int64_t ranks, int64_t buffer_bytes, int64_t shared_bytes,
               int64_t timeout_ns, std::shared_ptr<const NetworkLinks> network)
      : memory_(memory),
        rank_(rank),
        ranks_(ranks),
        buffer_bytes_(buffer_bytes),
        shared_bytes_(shared_bytes),
        timeout_ns_(timeout_ns),
        network_(std::move(network)) {}
  static int64_t bytes(int64_t ranks, int64_t buffer_bytes) {
    return kLine * (1 + ranks) + 2 * ranks * buffer_bytes;
  }

  int64_t rank() const { return rank_; }
  int64_t ranks() const { return ranks_; }
  int64_t buffer_bytes() const { return buffer_bytes_; }
  // Memory in which plans put what all ranks read; 0 bytes if there is none.
  char* shared() const { return memory_ + bytes(ranks_, buffer_bytes_); }
  int64_t shared_bytes() const { return shared_bytes_; }

  // Begins an exchange and returns its number.
  int64_t begin() { return ++number_; }
  char* buffer(int64_t rank, int64_t number) const {
    return memory_ + kLine * (1 + ranks_) + (2 * rank + number % 2) * buffer_bytes_;
  }
  // Lets the others read the first `bytes` of this rank's buffer.  Throws if the network fails.
  void publish(int64_t number, int64_t bytes);
  // Waits until a rank's buffer can be read.  Throws if a rank has failed, or does not answer in time.
  void wait_for(int64_t rank, int64_t number) const;

 private:
  static constexpr int64_t kLine = 64;

  std::atomic<int64_t>& line(int64_t index) const {
    return *reinterpret_cast<std::atomic<int64_t>*>(memory_ + kLine * index);
  }

  char* memory_;
  int64_t rank_, ranks_, buffer_bytes_, shared_bytes_, timeout_ns_;
  std::shared_ptr<const NetworkLinks> network_;
  int64_t number_ = 0;
};

}  // namespace armllm
