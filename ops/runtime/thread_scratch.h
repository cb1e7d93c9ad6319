// Scratch memory of a running tile: one block per thread, reused by each tile so that it stays in cache.
#pragma once

#include <cstdint>
#include <memory>

#include "runtime/types.h"

namespace armllm {

// Returns at least `bytes` bytes, 64-byte aligned.  They are valid until the thread's next call, so a tile
// must call this only once.
inline char* thread_memory(int64_t bytes) {
  thread_local std::unique_ptr<char[]> memory;
  thread_local int64_t capacity = 0;
  if (capacity < bytes) {
    capacity = 0;  // in case there is no more memory
    memory.reset();
    memory = std::make_unique<char[]>(bytes + 64);
    capacity = bytes;
  }
  return reinterpret_cast<char*>(round_up(reinterpret_cast<intptr_t>(memory.get()), 64));
}

}  // namespace armllm
