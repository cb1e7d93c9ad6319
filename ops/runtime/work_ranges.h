// Which worker takes which tiles of a phase.
//
// Every worker has neighboring tiles, one after the other, and who is through takes from the ends of what others have
// left.  Memory is read fastest in long stretches: after every jump the CPU has to find out anew that it may read ahead.
// Two cores that took turns at pieces of 256 KiB got 0.9 of what each got of a half of its own, of 64 KiB 0.7 (a Xeon).
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace armllm {

class Shares {
 public:
  static constexpr int64_t kNone = -1;
  static constexpr int64_t kMost = 64;                   // shares; more workers than that have some in common
  static constexpr int64_t kMostPieces = (1 << 22) - 1;  // of a phase
  static constexpr int64_t kMostPhases = (1 << 20) - 1;

  // While nobody takes anything.  Phases begin at 0 again.
  void reset(int64_t workers) {
    count_ = std::min(workers, kMost);
    for (int64_t i = 0; i < count_; ++i) shares_[i].state.store(0, std::memory_order_relaxed);
  }

  // A piece, or kNone once all of them are taken, or if others are in a later phase already.  Every worker gives the
  // same number of pieces; `empty` is the phase's own and begins as 0.
  int64_t take(int64_t worker, int64_t phase, int64_t pieces, std::atomic<uint64_t>& empty) {
    if (pieces < count_) return take_off(0, 1, phase, pieces, true);
    const int64_t own = worker % count_;
    if (const int64_t piece = take_off(own, count_, phase, pieces, true); piece != kNone) return piece;
    mark(empty, own);
    while (true) {
      const uint64_t left = all() & ~empty.load(std::memory_order_relaxed);
      if (left == 0) return kNone;
      const uint64_t behind = left & ~((uint64_t(2) << own) - 1);  // so that not all fall upon the same one
      const int64_t other = __builtin_ctzll(behind != 0 ? behind : left);
      if (const int64_t piece = take_off(other, count_, phase, pieces, false); piece != kNone) return piece;
      mark(empty, other);
    }
  }

 private:
  // The phase that a share was last taken from, 1 for the first, and its pieces that are left: in one word, so that a
  // worker that the system wakes late cannot take from a phase that is over.
  struct alignas(64) Share {
    std::atomic<uint64_t> state{0};
  };

  uint64_t all() const { return count_ == kMost ? ~uint64_t(0) : (uint64_t(1) << count_) - 1; }

  static void mark(std::atomic<uint64_t>& empty, int64_t share) {
    const uint64_t bit = uint64_t(1) << share;
    if ((empty.load(std::memory_order_relaxed) & bit) == 0) empty.fetch_or(bit, std::memory_order_relaxed);
  }

  int64_t take_off(int64_t share, int64_t shares, int64_t phase, int64_t pieces, bool first) {
    constexpr int kBits = 22;
    constexpr uint64_t kMask = (1 << kBits) - 1;
    const uint64_t now = uint64_t(phase + 1);
    std::atomic<uint64_t>& state = shares_[share].state;
    uint64_t seen = state.load(std::memory_order_relaxed);
    while (true) {
      if (seen >> (2 * kBits) > now) return kNone;
      int64_t begin = int64_t(seen >> kBits & kMask), end = int64_t(seen & kMask);
      if (seen >> (2 * kBits) < now) {
        begin = share * pieces / shares;
        end = (share + 1) * pieces / shares;
      }
      if (begin == end) return kNone;
      const int64_t piece = first ? begin++ : --end;
      const uint64_t left = now << (2 * kBits) | uint64_t(begin) << kBits | uint64_t(end);
      if (state.compare_exchange_weak(seen, left, std::memory_order_relaxed)) return piece;
    }
  }

  int64_t count_ = 1;
  Share shares_[kMost];
};

}  // namespace armllm
