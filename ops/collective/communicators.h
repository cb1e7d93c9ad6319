// The open communicators of this process.
#pragma once

#include <memory>

#include "collective/communicator.h"

namespace armllm {

// Throws if there is no communicator with this handle.
std::shared_ptr<Communicator> communicator_of(int64_t handle);

}  // namespace armllm
