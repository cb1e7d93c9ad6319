// Connections to the ranks of other machines.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

namespace armllm {

class NetworkLinks {
 public:
  // `sockets` has a connected stream socket for each rank; this rank's own is not read.
  NetworkLinks(std::vector<int64_t> sockets, int64_t rank, int64_t timeout_ns)
      : sockets_(std::move(sockets)), rank_(rank), timeout_ns_(timeout_ns) {}

  // Sends the first `bytes` of this rank's buffer to all others, and receives as many into each of theirs.
  // Throws if a rank has closed its connection or does not answer in time.
  void exchange(const std::function<char*(int64_t)>& buffer_of, int64_t bytes) const;

 private:
  std::vector<int64_t> sockets_;
  int64_t rank_, timeout_ns_;
};

}  // namespace armllm
