// Experts that stay in files, and a cache of those that were needed last.
//
// The stacked weights of a layer keep one range of addresses for all experts.  Memory that was never written
// takes none, so the range costs what its resident experts take.  An expert is read into its place when a
// step needs it, and evicted by giving its pages back: kernels know nothing of this.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace armllm {

// Stacked weights of a layer's experts: in memory, and contiguous in a file.
struct StoredExperts {
  char* address = nullptr;
  int64_t stride = 0;  // bytes from one expert to the next in memory: whole pages
  int64_t bytes = 0;   // of an expert
  int64_t file = 0;    // its index
  int64_t offset = 0;  // of the first expert in the file
};

struct StoredLayer {
  StoredExperts gate_up, down;
  int64_t experts = 0;
  int64_t bytes() const { return gate_up.stride + down.stride; }  // of an expert
};

class ExpertStore {
 public:
  struct Counts {
    int64_t hits = 0, misses = 0;        // needed experts that were resident, and those that were not
    int64_t bytes_read = 0, waited = 0;  // waited: nanoseconds
    int64_t resident = 0, budget = 0;    // bytes; `resident` includes experts that are being read
  };

  // The budget, in bytes, must hold all experts of each layer.  Throws if a file cannot be opened.
  ExpertStore(int64_t budget, std::vector<std::string> files, std::vector<StoredLayer> layers);
  ~ExpertStore();
  ExpertStore(const ExpertStore&) = delete;
  ExpertStore& operator=(const ExpertStore&) = delete;

  // Makes experts of a layer resident.  They stay so until the next call.  Throws if they cannot be read.
  void require(int64_t layer, const std::vector<int64_t>& experts);
  Counts counts();
  // Numbers of the resident experts: layer by layer, in the order of experts.
  std::vector<int64_t> resident();

  const std::vector<StoredLayer>& layers() const { return layers_; }

 private:
  enum class State : uint8_t { absent, reading, resident };
  struct Expert {
    State state = State::absent;
    int32_t pieces = 0;  // that are yet to be read
    bool failed = false;
    int64_t needed = 0;  // number of the last call that must not evict it
    std::list<int64_t>::iterator place;
  };
  struct Piece {
    int64_t expert, file, offset, bytes;
    char* address;
  };
  using Lock = std::unique_lock<std::mutex>;

  int64_t layer_of(int64_t expert) const;
  bool evict_one();
  bool begin_read(int64_t expert, bool hot, bool ahead);
  void read_ahead(int64_t layer);
  void add_pieces(int64_t expert, const StoredExperts& part, bool ahead);
  void start_readers();
  void serve();
  std::string read(const Piece& piece) const;
  void finish(const Piece& piece, const std::string& error);
  void drop(int64_t expert);

  const int64_t budget_;
  const std::vector<std::string> names_;
  const std::vector<StoredLayer> layers_;
  std::vector<int64_t> first_;  // number of each layer's first expert, and of all experts
  std::vector<int> files_;

  std::mutex mutex_;
  std::condition_variable work_, done_;
  std::vector<Expert> experts_;
  std::list<int64_t> order_;  // experts that are not absent; the next one to evict is the last
  std::deque<Piece> urgent_, ahead_;
  std::vector<std::thread> readers_;
  std::string error_;
  Counts counts_;
  int64_t call_ = 0;
  bool stop_ = false;
};

// Number of open stores, which tells layers without one that there is nothing to look up.
extern std::atomic<int64_t> open_expert_stores;

// Makes experts resident if a store has the weights at this address; called before they are used.
void require_stored(const void* gate_up, const std::vector<int64_t>& experts);

}  // namespace armllm
