#include "moe/expert_store.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <system_error>
#include <utility>

namespace armllm {
namespace {

constexpr int kReaders = 8;  // reads in flight: a disk is slow with fewer
constexpr int64_t kPieceBytes = int64_t{1} << 20;

int64_t nanoseconds() {
  return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
}

void give_back(char* address, int64_t bytes) {
#if defined(__APPLE__)
  madvise(address, static_cast<size_t>(bytes), MADV_FREE);
#else
  madvise(address, static_cast<size_t>(bytes), MADV_DONTNEED);
#endif
}

// Keeps the system from holding a second copy of what was read.
void forget([[maybe_unused]] int file, [[maybe_unused]] int64_t offset, [[maybe_unused]] int64_t bytes) {
#if defined(POSIX_FADV_DONTNEED)
  posix_fadvise(file, offset, bytes, POSIX_FADV_DONTNEED);
#endif
}

void expect_no_order([[maybe_unused]] int file) {
#if defined(POSIX_FADV_RANDOM)
  posix_fadvise(file, 0, 0, POSIX_FADV_RANDOM);
#endif
}

}  // namespace

ExpertStore::ExpertStore(int64_t budget, std::vector<std::string> files, std::vector<StoredLayer> layers)
    : budget_(budget), names_(std::move(files)), layers_(std::move(layers)) {
  int64_t count = 0;
  for (const StoredLayer& layer : layers_) {
    first_.push_back(count);
    count += layer.experts;
  }
  first_.push_back(count);
  experts_.resize(count);
  counts_.budget = budget_;
  for (const std::string& name : names_) {
    const int file = open(name.c_str(), O_RDONLY | O_CLOEXEC);
    if (file < 0) {
      const std::string reason = std::strerror(errno);
      for (const int opened : files_) close(opened);
      throw std::runtime_error(name + " cannot be opened: " + reason);
    }
    expect_no_order(file);
    files_.push_back(file);
  }
}

ExpertStore::~ExpertStore() {
  {
    const Lock lock(mutex_);
    stop_ = true;
  }
  work_.notify_all();
  for (std::thread& reader : readers_) reader.join();
  for (const int file : files_) close(file);
}

int64_t ExpertStore::layer_of(int64_t expert) const {
  return std::upper_bound(first_.begin(), first_.end(), expert) - first_.begin() - 1;
}

void ExpertStore::require(int64_t layer, const std::vector<int64_t>& experts) {
  Lock lock(mutex_);
  start_readers();
  ++call_;
  // A step that needs most of a layer goes through all layers like this.  The experts that it reads are
  // evicted first, so that one long prompt does not evict what single tokens need.
  const bool streams = 2 * static_cast<int64_t>(experts.size()) > layers_[layer].experts;
  bool awaits_ahead = false;
  std::vector<int64_t> absent;
  for (const int64_t number : experts) {
    const int64_t index = first_[layer] + number;
    Expert& expert = experts_[index];
    expert.needed = call_;
    if (expert.state == State::resident) {
      ++counts_.hits;
    } else {
      ++counts_.misses;
      awaits_ahead = awaits_ahead || expert.state == State::reading;
    }
    if (expert.state == State::absent) {
      absent.push_back(index);
    } else if (!streams) {
      order_.splice(order_.begin(), order_, expert.place);
    }
  }
  if (awaits_ahead) {
    urgent_.insert(urgent_.end(), ahead_.begin(), ahead_.end());
    ahead_.clear();
  }
  const int64_t began = absent.empty() && !awaits_ahead ? 0 : nanoseconds();
  for (const int64_t index : absent) {
    while (!begin_read(index, !streams, false)) {  // reads that are under way have the space
      work_.notify_all();
      done_.wait(lock);
    }
  }
  if (streams) read_ahead((layer + 1) % static_cast<int64_t>(layers_.size()));
  work_.notify_all();
  const auto reads = [&](int64_t number) { return experts_[first_[layer] + number].state == State::reading; };
  done_.wait(lock, [&] { return std::none_of(experts.begin(), experts.end(), reads); });
  if (began != 0) counts_.waited += nanoseconds() - began;
  for (const int64_t number : experts)
    if (experts_[first_[layer] + number].state != State::resident) throw std::runtime_error(error_);
}

// Evicts the coldest expert that this call does not need; false if there is none.
bool ExpertStore::evict_one() {
  for (auto at = order_.rbegin(); at != order_.rend(); ++at) {
    const Expert& expert = experts_[*at];
    if (expert.state != State::resident || expert.needed == call_) continue;
    drop(*at);
    return true;
  }
  return false;
}

// Begins to read an absent expert; false if there is no space for it yet.
bool ExpertStore::begin_read(int64_t index, bool hot, bool ahead) {
  const StoredLayer& layer = layers_[layer_of(index)];
  while (counts_.resident + layer.bytes() > budget_)
    if (!evict_one()) return false;
  counts_.resident += layer.bytes();
  Expert& expert = experts_[index];
  expert.state = State::reading;
  expert.failed = false;
  expert.place = order_.insert(hot ? order_.begin() : order_.end(), index);
  add_pieces(index, layer.gate_up, ahead);
  add_pieces(index, layer.down, ahead);
  return true;
}

// Begins to read a layer's absent experts while the layer before it computes.
void ExpertStore::read_ahead(int64_t layer) {
  for (int64_t index = first_[layer]; index < first_[layer + 1]; ++index) experts_[index].needed = call_;
  for (int64_t index = first_[layer]; index < first_[layer + 1]; ++index)
    if (experts_[index].state == State::absent && !begin_read(index, false, true)) return;
}

void ExpertStore::add_pieces(int64_t index, const StoredExperts& part, bool ahead) {
  const int64_t number = index - first_[layer_of(index)];
  char* const address = part.address + number * part.stride;
  for (int64_t at = 0; at < part.bytes; at += kPieceBytes) {
    const int64_t bytes = std::min(kPieceBytes, part.bytes - at);
    (ahead ? ahead_ : urgent_)
        .push_back({index, part.file, part.offset + number * part.bytes + at, bytes, address + at});
    ++experts_[index].pieces;
  }
}

void ExpertStore::start_readers() {
  try {
    while (readers_.size() < kReaders) readers_.emplace_back([this] { serve(); });
  } catch (const std::system_error&) {  // the process has all threads that it may have
    if (readers_.empty()) throw;
  }
}

void ExpertStore::serve() {
  Lock lock(mutex_);
  while (true) {
    work_.wait(lock, [&] { return stop_ || !urgent_.empty() || !ahead_.empty(); });
    if (stop_) return;
    std::deque<Piece>& queue = urgent_.empty() ? ahead_ : urgent_;
    const Piece piece = queue.front();
    queue.pop_front();
    std::string error;
    if (!experts_[piece.expert].failed) {  // else the other pieces are of no use
      lock.unlock();
      error = read(piece);
      lock.lock();
    }
    finish(piece, error);
  }
}

// Returns what is wrong; empty if nothing is.
std::string ExpertStore::read(const Piece& piece) const {
  const int file = files_[piece.file];
  int64_t done = 0;
  while (done < piece.bytes) {
    const ssize_t count = pread(file, piece.address + done, static_cast<size_t>(piece.bytes - done),
                                static_cast<off_t>(piece.offset + done));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return names_[piece.file] + " cannot be read: " + std::strerror(errno);
    if (count == 0) return names_[piece.file] + " is shorter than it was when the model was loaded";
    done += count;
  }
  forget(file, piece.offset, piece.bytes);
  return "";
}

void ExpertStore::finish(const Piece& piece, const std::string& error) {
  Expert& expert = experts_[piece.expert];
  if (error.empty() && !expert.failed) {
    counts_.bytes_read += piece.bytes;
  } else if (!error.empty()) {
    expert.failed = true;
    error_ = error;
  }
  if (--expert.pieces != 0) return;
  expert.state = State::resident;
  if (expert.failed) drop(piece.expert);
  done_.notify_all();
}

// Evicts an expert, or removes one that could not be read.
void ExpertStore::drop(int64_t index) {
  const int64_t layer = layer_of(index), number = index - first_[layer];
  for (const StoredExperts* part : {&layers_[layer].gate_up, &layers_[layer].down})
    give_back(part->address + number * part->stride, part->stride);
  experts_[index].state = State::absent;
  order_.erase(experts_[index].place);
  counts_.resident -= layers_[layer].bytes();
}

ExpertStore::Counts ExpertStore::counts() {
  const Lock lock(mutex_);
  return counts_;
}

std::vector<int64_t> ExpertStore::resident() {
  const Lock lock(mutex_);
  std::vector<int64_t> numbers;
  for (int64_t index = 0; index < first_.back(); ++index)
    if (experts_[index].state == State::resident) numbers.push_back(index);
  return numbers;
}

}  // namespace armllm
