// Positions of values in a panel, and plain numbers read from it: what packing and unpacking share.
#pragma once

#include <cstdint>
#include <cstring>

namespace armllm {

// Position of row r's value k among the values of a panel.
struct NibblePosition {
  int64_t byte;
  bool high;
};

inline NibblePosition nibble_position(int64_t row, int64_t k) {
  return {k / 8 * 64 + row % 8 * 8 + k % 8, row >= 8};
}

inline int64_t int8_position(int64_t row, int64_t k) { return k / 4 * 64 + row * 4 + k % 4; }

// Nibble of one row, 0 … 15, in a section of 8 bytes per group.
inline int nibble_of(const uint8_t* section, int64_t group, int64_t row) {
  const uint8_t pair = section[group * 8 + row % 8];
  return row >= 8 ? pair >> 4 : pair & 15;
}

inline float widen(uint16_t bf16) {
  const uint32_t bits = uint32_t(bf16) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

}  // namespace armllm
