// driver OP [variant=NAME] [key=value…]: calls the op twice and marks the second call; prints what it was
// worth.
#include "driver.h"

#include <cstdio>
#include <cstring>

namespace bench {

using torch_shim::ScalarType;
using torch_shim::Tensor;

Options::Options(int count, char** arguments) {
  for (int i = 0; i < count; ++i) {
    const std::string text = arguments[i];
    const size_t equals = text.find('=');
    if (equals == std::string::npos) throw std::runtime_error("not of the form key=value: " + text);
    values_[text.substr(0, equals)] = text.substr(equals + 1);
  }
}

std::string Options::word(const std::string& key, const std::string& fallback) const {
  used_[key] = true;
  const auto found = values_.find(key);
  return found == values_.end() ? fallback : found->second;
}

int64_t Options::number(const std::string& key, int64_t fallback) const {
  return std::stoll(word(key, std::to_string(fallback)));
}

ScalarType Options::type(const std::string& key, const std::string& fallback) const {
  const std::string name = word(key, fallback);
  if (name == "f32") return ScalarType::Float;
  if (name == "bf16") return ScalarType::BFloat16;
  if (name == "f16") return ScalarType::Half;
  if (name == "i8") return ScalarType::Char;
  throw std::runtime_error("unknown type " + name + "; there are: f32, bf16, f16, i8");
}

void Options::all_used() const {
  for (const auto& [key, value] : values_)
    if (!used_.count(key)) throw std::runtime_error("unknown option " + key + "=" + value);
}

namespace {

uint16_t half_of(float value) {
  const __fp16 half = __fp16(value);
  uint16_t bits;
  std::memcpy(&bits, &half, 2);
  return bits;
}

// Few instructions a value: an emulator runs all of it.
float next(uint32_t& state) {
  state = state * 1664525u + 1013904223u;
  return float(int32_t(state)) / float(1u << 30);
}

}  // namespace

Tensor values(const std::vector<int64_t>& sizes, ScalarType type) {
  const Tensor tensor = torch_shim::zeros(sizes, type);
  constexpr int64_t kPeriod = 4093;  // values before they repeat
  char* data = static_cast<char*>(tensor.data_ptr());
  const int64_t size = type == ScalarType::Float ? 4 : type == ScalarType::Char ? 1 : 2;
  const int64_t bytes = tensor.numel() * size;
  uint32_t state = 1;
  for (int64_t i = 0; i < std::min(tensor.numel(), kPeriod); ++i) {
    const float value = next(state);
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    if (type == ScalarType::BFloat16) bits >>= 16;
    if (type == ScalarType::Half) bits = half_of(value);
    if (type == ScalarType::Char) bits = uint32_t(int32_t(value * 63));
    std::memcpy(data + i * size, &bits, size_t(size));
  }
  for (int64_t done = kPeriod * size; done < bytes; done *= 2)
    std::memcpy(data + done, data, size_t(std::min(done, bytes - done)));
  return tensor;
}

Tensor integers(const std::vector<int64_t>& sizes, const std::function<int64_t(int64_t)>& value,
                ScalarType type) {
  const Tensor tensor = torch_shim::zeros(sizes, type);
  for (int64_t i = 0; i < tensor.numel(); ++i) {
    const int64_t v = value(i);
    if (type == ScalarType::Long) {
      static_cast<int64_t*>(tensor.data_ptr())[i] = v;
    } else if (type == ScalarType::Int) {
      static_cast<int32_t*>(tensor.data_ptr())[i] = int32_t(v);
    } else {
      static_cast<int8_t*>(tensor.data_ptr())[i] = int8_t(v);
    }
  }
  return tensor;
}

namespace {

Case case_named(const std::string& op, const Options& options) {
  if (op == "int4_moe") return moe_case(options);
  if (op.find("linear") != std::string::npos) return linear_case(op, options);
  if (is_sparse(op)) return sparse_case(op, options);
  if (op.find("attention") != std::string::npos) return attention_case(op, options);
  if (is_recurrent(op)) return recurrent_case(op, options);
  return row_case(op, options);
}

void marked(const Body& body) {
  __asm__ volatile("hint #112" ::: "memory");
  body();
  __asm__ volatile("hint #113" ::: "memory");
}

}  // namespace
}  // namespace bench

int main(int count, char** arguments) {
  using namespace bench;
  try {
    if (count < 2) throw std::runtime_error("driver OP [variant=NAME] [key=value...]");
    const Options options(count - 2, arguments + 2);
    torch_shim::Call("isa_select").with("name", options.word("variant", "")).run();
    const Case measured = case_named(arguments[1], options);
    options.all_used();
    measured.run([](const Body& body) { body(); });
    measured.run(marked);
    std::printf("macs=%.0f elements=%.0f\n", measured.macs, measured.elements);
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
