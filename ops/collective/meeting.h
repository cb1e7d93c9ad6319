// A wait of tensor parallel ranks for each other, behind which each may read what the others have written.
#pragma once

#include <memory>

#include "collective/communicator.h"
#include "runtime/task_set.h"

namespace armllm {

class Meeting final : public TaskSet {
 public:
  std::shared_ptr<Communicator> communicator;

  int phases() const override { return 1; }
  // Called once all threads of this rank have ended what they did before.
  int64_t tiles(int) const override {
    number_ = communicator->begin();
    communicator->publish(number_, 0);
    return 1;
  }
  void tile(int, int64_t) override {
    for (int64_t i = 1; i < communicator->ranks(); ++i)
      communicator->wait_for((communicator->rank() + i) % communicator->ranks(), number_);
  }

 private:
  mutable int64_t number_ = 0;
};

}  // namespace armllm
