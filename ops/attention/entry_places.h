// Places of compressed entries in a paged cache.
//
// Every `rate` positions of a sequence become one entry.  It lies in the block of the last of them, in the
// order of the positions: whoever shares a block shares its entries.
#pragma once

#include <cstdint>

namespace armllm {

struct EntryPlaces {
  int64_t rate = 0;        // positions of an entry
  int64_t block_size = 0;  // positions of a block
  int64_t per_block = 0;   // rows of a block: the most entries that can end in it

  static int64_t most_per_block(int64_t block_size, int64_t rate) { return (block_size + rate - 1) / rate; }

  // Row of an entry, counted over all blocks; `blocks` are those of the sequence.
  int64_t row(const int32_t* blocks, int64_t entry) const {
    const int64_t block = ((entry + 1) * rate - 1) / block_size;
    return blocks[block] * per_block + entry - block * block_size / rate;
  }
};

}  // namespace armllm
