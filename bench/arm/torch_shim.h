// A stand-in for libtorch, just large enough to call the registered ops as PyTorch would: it keeps what they
// register, makes their tensors, and calls one by name with the defaults of its schema.  With it the ops' own
// object files link into a static program, which an emulator starts at once and counts to the last
// instruction.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <functional>
#include <map>
#include <string>
#include <vector>

namespace torch_shim {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

struct Argument {
  std::string type, name, fallback;  // fallback: as the schema writes it; empty where there is none
};

struct Op {
  std::vector<Argument> arguments;
  uint64_t outputs = 0;
  void (*kernel)(StableIValue*, uint64_t, uint64_t) = nullptr;
};

// Of the namespace `armllm`; throws std::runtime_error where there is none of that name.
const Op& op(const std::string& name);
bool has_argument(const std::string& op_name, const std::string& argument);

// A contiguous tensor, 64-byte aligned, filled with zeros.
Tensor zeros(const std::vector<int64_t>& sizes, ScalarType type);

// A call that can be made again and again: every call gets new handles, since an op consumes what it is
// given.
class Call {
 public:
  explicit Call(const std::string& name) : name_(name) {}

  template <typename T>
  Call& with(const std::string& argument, const T& value) {
    makers_[argument] = [value] { return torch::stable::detail::from(value); };
    return *this;
  }
  Call& with(const std::string& argument, const char* value) { return with(argument, std::string(value)); }
  Call& with(const std::string& argument, const Tensor& value, bool optional) {
    return optional ? with(argument, std::optional<Tensor>(value)) : with(argument, value);
  }

  // Runs the op; `around` gets what it does when called, between the packing of the arguments and of the
  // results.
  std::vector<StableIValue> run(const std::function<void(const std::function<void()>&)>& around) const;
  std::vector<StableIValue> run() const {
    return run([](const std::function<void()>& body) { body(); });
  }
  Tensor tensor() const { return torch::stable::detail::to<Tensor>(run()[0]); }

 private:
  std::string name_;
  std::map<std::string, std::function<StableIValue()>> makers_;
};

}  // namespace torch_shim
