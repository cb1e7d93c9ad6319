// paged_attention: divides the work into tiles.  Nothing in this file affects the bits of the result.
#include "attention/paged_attention.h"

#include <algorithm>
#include <type_traits>

#include "dispatch/variants.h"
#include "runtime/thread_scratch.h"

namespace armllm {
namespace {

// A sequence with up to this many row tiles is spread: its splits become separate tiles, which a last phase
// merges.  A sequence with more row tiles keeps all threads busy anyway, and each tile merges its own splits.
constexpr int64_t kSpreadTiles = 4;
// Limit on the floats of unmerged results.  A sequence that would exceed it is not spread.
constexpr int64_t kPartialFloats = int64_t{16} << 20;
// Tiles per thread, enough to keep the load balanced at the end of a phase; and most splits of a tile.
constexpr int64_t kTilesAThread = 8, kMostSplits = 8;
// Fewest query rows for which rearranging a split of latents pays off.
constexpr int64_t kFewLatentRows = 8;
// Up to this many sequences are searched linearly.  More sequences get an index, which costs a phase.
constexpr int64_t kIndexed = 16;

// Numbers of a sequence's first piece, first merge and first float of unmerged results.
struct Place {
  int64_t piece = 0, merge = 0, partial = 0;
};

struct Sequence {
  int64_t first_token, tokens, length;
  int64_t kv_head, kv_heads;    // the first one that attends, and how many do
  int64_t first_split, splits;  // the splits that at least one of the tokens sees
  int64_t rows;                 // (token, query head) pairs of a whole group
  int64_t row_tiles;            // per kv head; empty ones if its group lacks heads
  bool spread;                  // see kSpreadTiles
  int64_t splits_a_tile;  // if spread: consecutive, so that a tile can prefetch the keys of its next split

  int64_t split_tiles() const { return spread ? ceil_div(splits, splits_a_tile) : 1; }
};

// Query heads of a whole group.
int64_t group_of(const AttentionArgs& a) {
  return a.groups.size > 0 ? a.groups.size : a.q_heads / a.kv_heads;
}

// Query heads that read a kv head: the first or the last group may lack some.
struct HeadRange {
  int64_t begin, end;

  HeadRange(const AttentionArgs& a, int64_t kv_head) {
    const int64_t group = group_of(a), first = kv_head * group - a.groups.skipped;
    begin = std::max<int64_t>(first, 0);
    end = std::min(first + group, a.q_heads);
  }
  int64_t count() const { return end - begin; }
};

int64_t partial_width(const AttentionArgs& a) { return value_stride(a.value_size) + 2; }

// Query rows of a tile: fewer than the kernel's best number if that number would leave threads idle.
int64_t tile_rows(const AttentionArgs& a) {
  const int64_t best = variant().attention->tile_rows(a), all = a.tokens * a.q_heads;
  const int64_t rows = all < best * 4 * a.threads ? best / 2 : best;
  // All heads share a latent, so only row tiles can divide a step of few, short sequences among threads.
  if (!a.latent || a.sequences * ceil_div(a.max_seq_len, kSplit) >= a.threads) return rows;
  return std::clamp(round_up(ceil_div(all, a.threads), 2), std::min(kFewLatentRows, rows), rows);
}

int64_t partial_floats(const AttentionArgs& a, const Sequence& s) {
  return s.kv_heads * s.rows * s.splits * partial_width(a);
}

// True if parts alone keep all threads busy.
bool are_many_parts(const AttentionArgs& a) {
  return a.parts != nullptr && a.sequences >= kTilesAThread * a.threads;
}

Sequence sequence_of(const AttentionArgs& a, int64_t index, const Place& at) {
  Sequence s;
  s.kv_head = 0, s.kv_heads = a.kv_heads;
  if (a.parts != nullptr) {
    const SequencePart& part = a.parts[index];
    s.first_token = part.first_token, s.tokens = part.tokens, s.length = part.length;
    if (part.kv_head >= 0) s.kv_head = part.kv_head, s.kv_heads = 1;
  } else {
    s.first_token = a.query_start[index];
    s.tokens = a.query_start[index + 1] - s.first_token;
    s.length = a.seq_lens[index];
  }
  int64_t first = 0;
  if (a.window > 0 && s.length - s.tokens - a.window + 1 > 0) first = s.length - s.tokens - a.window + 1;
  s.first_split = first / kSplit;
  s.splits = s.tokens > 0 ? ceil_div(s.length, kSplit) - s.first_split : 0;
  s.rows = s.tokens * group_of(a);
  s.row_tiles = ceil_div(s.rows, tile_rows(a));
  s.spread = s.splits > 1 && s.row_tiles <= kSpreadTiles && !are_many_parts(a) &&
             at.partial + partial_floats(a, s) <= kPartialFloats;
  const int64_t all = a.sequences * a.kv_heads * s.row_tiles * s.splits;
  s.splits_a_tile = std::clamp<int64_t>(all / (kTilesAThread * a.threads), 1, kMostSplits);
  return s;
}

int64_t pieces_of(const Sequence& s) { return s.kv_heads * s.row_tiles * s.split_tiles(); }

Place after(const AttentionArgs& a, const Sequence& s, Place at) {
  at.piece += pieces_of(s);
  if (s.spread) {
    at.merge += s.kv_heads * s.row_tiles;
    at.partial += partial_floats(a, s);
  }
  return at;
}

struct Found {
  int64_t index;
  Place place;
  Sequence sequence;
};

// Finds the sequence that contains a piece (`count` = &Place::piece) or a merge (`count` = &Place::merge).
Found find(const AttentionArgs& a, int64_t Place::* count, int64_t tile) {
  Found f{0, {}, {}};
  if (a.sequences > kIndexed) {
    const Place* places = static_cast<const Place*>(a.scratch);
    int64_t low = 0, high = a.sequences;  // places[low].*count ≤ tile < places[high].*count
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      (places[middle].*count <= tile ? low : high) = middle;
    }
    f.index = low;
    f.place = places[low];
    f.sequence = sequence_of(a, low, f.place);
    return f;
  }
  while (true) {
    f.sequence = sequence_of(a, f.index, f.place);
    const Place next = after(a, f.sequence, f.place);
    if (tile < next.*count) return f;
    f.place = next;
    ++f.index;
  }
}

int64_t index_bytes(const AttentionArgs& a) {
  return a.sequences > kIndexed ? round_up((a.sequences + 1) * static_cast<int64_t>(sizeof(Place)), 64) : 0;
}

// Unmerged results of one row in one split.  Each of the three arrays is [kv heads][splits][rows].
struct Partials {
  float* maximum;
  float* sum;
  float* values;

  Partials(const AttentionArgs& a, const Found& f, int64_t kv_head, int64_t split, int64_t row) {
    const int64_t rows = f.sequence.rows, width = value_stride(a.value_size);
    const int64_t all = f.sequence.kv_heads * f.sequence.splits * rows;
    const int64_t at = ((kv_head - f.sequence.kv_head) * f.sequence.splits + split) * rows + row;
    float* base = reinterpret_cast<float*>(static_cast<char*>(a.scratch) + index_bytes(a)) + f.place.partial;
    values = base + at * width;
    maximum = base + all * width + at;
    sum = base + all * (width + 1) + at;
  }
};

// A query row: a token, one of the query heads that share a kv head, and the positions that the row sees.
struct Row {
  const AttentionArgs& a;
  HeadRange heads;
  int64_t token, head;
  int64_t position, length;  // of the token, and of its sequence

  int64_t first() const { return a.window > 0 && position >= a.window ? position + 1 - a.window : 0; }
  int64_t last() const {
    // compared with the rest of the sequence first: sums of any number do not overflow
    const int64_t later = a.later ? std::max(a.ahead, a.later[token]) : a.ahead;
    return position + 1 + std::min(later, length - position - 1);
  }
  void next() {  // increments, because a division per row costs measurable time
    if (++head < heads.end) return;
    head = heads.begin;
    ++token;
    ++position;
  }
};

// Query rows of one tile, ordered by token, then by head.
struct Run {
  const AttentionArgs& a;
  const Found& f;
  int64_t kv_head;
  HeadRange heads;
  int64_t row, rows;

  Row at(int64_t r) const {
    const Sequence& s = f.sequence;
    const int64_t token = (row + r) / heads.count(), head = heads.begin + (row + r) % heads.count();
    return {a, heads, s.first_token + token, head, s.length - s.tokens + token, s.length};
  }
  const int32_t* blocks() const {
    return a.parts != nullptr ? a.parts[f.index].blocks : a.block_table + f.index * a.block_table_stride;
  }
  int64_t first_split() const { return at(0).first() / kSplit; }
  int64_t end_split() const { return ceil_div(at(rows - 1).last(), kSplit); }
  // Rows that see at least one position of a split, and perhaps rows before them.
  struct Range {
    int64_t begin, end;
  };
  Range rows_seeing(int64_t split) const {
    const int64_t past = f.sequence.length - f.sequence.tokens, group = heads.count();
    const int64_t begin = a.later ? 0 : (split * kSplit - past - a.ahead) * group - row;
    const int64_t end = a.window > 0 ? ((split + 1) * kSplit + a.window - 1 - past) * group - row : rows;
    return {std::clamp<int64_t>(begin, 0, rows), std::clamp<int64_t>(end, 0, rows)};
  }
};

// Scratch of a running tile.  It belongs to the thread, so queries and scores stay in the cache of their
// core.
struct Workspace {
  AttentionTile tile;
  float *total_maximum, *total_sum, *total_values;
  int64_t *first, *last, *position;
  float* slopes;
  const float** relative;
  const float** biases;
  int32_t* positions;

  Workspace(const AttentionArgs& a, int64_t some_rows) {
    const int64_t rows = round_up(some_rows, 2);
    constexpr int64_t kFloat = sizeof(float);
    const int64_t width = value_stride(a.value_size);
    const int64_t row_bytes = query_bytes(a.head_size) + kWeightBytes +
                              kFloat * (kScoreStride + 2 * width + 5) +
                              5 * static_cast<int64_t>(sizeof(int64_t));
    const int64_t bytes =
        panel_floats(a.head_size) * kFloat + edge_bytes(a.value_size) + split_bytes(a) + rows * row_bytes;
    const int64_t position_bytes = a.parts != nullptr ? a.max_seq_len * int64_t{sizeof(int32_t)} : 0;
    char* next = thread_memory(bytes + position_bytes + 19 * 64);
    const auto take = [&next](auto*& part, int64_t size) {
      part = reinterpret_cast<std::remove_reference_t<decltype(part)>>(next);
      next += round_up(size, 64);
    };
    take(tile.panel, panel_floats(a.head_size) * kFloat);
    take(tile.edges, edge_bytes(a.value_size));
    take(tile.split, split_bytes(a));
    char *query, *weights;
    take(query, rows * query_bytes(a.head_size));
    take(weights, rows * kWeightBytes);
    tile.query = query;
    tile.weights = weights;
    take(tile.scores, rows * kScoreStride * kFloat);
    take(tile.values, rows * width * kFloat);
    take(total_values, rows * width * kFloat);
    take(first, rows * static_cast<int64_t>(sizeof(int64_t)));
    take(last, rows * static_cast<int64_t>(sizeof(int64_t)));
    take(position, rows * static_cast<int64_t>(sizeof(int64_t)));
    take(tile.maximum, rows * kFloat);
    take(tile.sum, rows * kFloat);
    take(total_maximum, rows * kFloat);
    take(total_sum, rows * kFloat);
    take(slopes, rows * kFloat);
    take(relative, rows * static_cast<int64_t>(sizeof(*relative)));
    take(biases, rows * static_cast<int64_t>(sizeof(*biases)));
    take(positions, position_bytes);
  }
};

// Writes the last positions that a token attends to, then its entries.
void name_recent_and_entries(const SequencePart& part, int64_t rate, int32_t* positions) {
  const int32_t last = static_cast<int32_t>(part.end / std::max<int64_t>(rate, 1)) - 1;
  for (int64_t i = 0; i < part.length; ++i) {
    const int64_t n = i - part.recent;
    if (n < 0)
      positions[i] = static_cast<int32_t>(part.end + n);
    else  // kernels trust entries, but plans may be damaged
      positions[i] = -1 - std::clamp(part.positions ? part.positions[n] : static_cast<int32_t>(n), 0, last);
  }
}

AttentionTile tile_of(const Run& run, const Workspace& w) {
  const AttentionArgs& a = run.a;
  AttentionTile tile = w.tile;
  tile.rows = run.rows;
  tile.first = w.first;
  tile.last = w.last;
  if (a.slopes != nullptr) tile.slopes = w.slopes;
  if (a.relative != nullptr) tile.relative = w.relative;
  if (a.biases != nullptr) tile.biases = w.biases, tile.position = w.position;
  tile.blocks = run.blocks();
  tile.kv_head = run.kv_head;
  if (a.parts != nullptr && a.parts[run.f.index].recent >= 0) {
    name_recent_and_entries(a.parts[run.f.index], a.places.rate, w.positions);
    tile.positions = w.positions;
  } else if (a.parts != nullptr && a.parts[run.f.index].positions != nullptr) {
    const SequencePart& part = a.parts[run.f.index];
    // Kernels trust positions, but plans may be damaged.
    for (int64_t i = 0; i < part.length; ++i)
      w.positions[i] = std::clamp(part.positions[i], 0, static_cast<int32_t>(part.end - 1));
    tile.positions = w.positions;
  }
  Row row = run.at(0);
  for (int64_t r = 0; r < run.rows; ++r, row.next()) {
    variant().attention->load_query(a, row.token, row.head, tile, r);
    w.first[r] = row.first();
    w.last[r] = row.last();
    if (a.slopes != nullptr) w.slopes[r] = a.slopes[row.head];
    w.position[r] = row.position;
    if (a.biases != nullptr) w.biases[r] = a.biases + row.head * (2 * a.reach + 1);
    if (a.relative != nullptr) w.relative[r] = a.relative + row.token * a.relative_stride + row.head * a.rank;
  }
  return tile;
}

// Consecutive splits of one row tile: the unit of work that a thread takes.
struct Piece {
  Run run;
  int64_t begin, end;

  SplitAhead at(int64_t split) const {
    const int64_t begin = split * kSplit;
    return {run.blocks() + begin / run.a.block_size, std::max<int64_t>(run.at(0).first() - begin, 0),
            std::min(run.at(run.rows - 1).last() - begin, kSplit), run.kv_head};
  }
  SplitAhead first() const { return begin < end ? at(begin) : SplitAhead{}; }
  SplitAhead next_of(int64_t split, const SplitAhead& next_piece) const {
    return split + 1 < end ? at(split + 1) : next_piece;
  }
};

// Attends to the splits of a piece in order and merges each result into the total.
void attend_rows(const Piece& piece, bool is_near, const SplitAhead& next) {
  if (piece.begin >= piece.end) return;
  const Run& run = piece.run;
  const AttentionArgs& a = run.a;
  const AttentionKernels& kernels = *variant().attention;
  const int64_t width = value_stride(a.value_size);
  const Workspace w(a, run.rows);
  AttentionTile tile = tile_of(run, w);
  tile.is_near = is_near;
  // The total starts as the result of the first split, also for rows that see no position of it.
  AttentionTile start = tile;
  start.maximum = w.total_maximum;
  start.sum = w.total_sum;
  start.values = w.total_values;
  start.split_begin = piece.begin * kSplit;
  start.next = piece.next_of(piece.begin, next);
  kernels.attend(a, start);
  tile.is_near = true;
  for (int64_t s = piece.begin + 1; s < piece.end; ++s) {
    tile.split_begin = s * kSplit;
    tile.next = piece.next_of(s, next);
    kernels.attend(a, tile);
    const Run::Range rows = run.rows_seeing(s);
    kernels.merge(w.total_maximum + rows.begin, w.total_sum + rows.begin, w.total_values + rows.begin * width,
                  tile.maximum + rows.begin, tile.sum + rows.begin, tile.values + rows.begin * width,
                  a.value_size, rows.end - rows.begin);
  }
  Row row = run.at(0);
  for (int64_t r = 0; r < run.rows; ++r, row.next())
    kernels.finish(a, row.token, row.head, w.total_maximum[r], w.total_sum[r], w.total_values + r * width);
}

// Attends to the splits of a piece and stores their results unmerged, for merge_rows.
void attend_splits(const Piece& piece, bool is_near, const SplitAhead& next) {
  if (piece.begin >= piece.end) return;
  const Run& run = piece.run;
  AttentionTile tile = tile_of(run, Workspace(run.a, run.rows));
  tile.is_near = is_near;
  for (int64_t s = piece.begin; s < piece.end; ++s) {
    const Partials to(run.a, run.f, run.kv_head, s - run.f.sequence.first_split, run.row);
    tile.split_begin = s * kSplit;
    tile.next = piece.next_of(s, next);
    tile.maximum = to.maximum;
    tile.sum = to.sum;
    tile.values = to.values;
    variant().attention->attend(run.a, tile);
    tile.is_near = true;
  }
}

void merge_rows(const Run& run) {
  if (run.rows == 0) return;
  const AttentionArgs& a = run.a;
  const AttentionKernels& kernels = *variant().attention;
  // The total starts as the result of the first split, also for rows that see no position of it.
  const int64_t first_split = run.first_split(), end_split = run.end_split(),
                width = value_stride(a.value_size);
  const auto part = [&](int64_t split, int64_t row) {
    return Partials(a, run.f, run.kv_head, split - run.f.sequence.first_split, run.row + row);
  };
  const Partials total = part(first_split, 0);
  for (int64_t s = first_split + 1; s < end_split; ++s) {
    const Run::Range rows = run.rows_seeing(s);
    const Partials from = part(s, rows.begin);
    kernels.merge(total.maximum + rows.begin, total.sum + rows.begin, total.values + rows.begin * width,
                  from.maximum, from.sum, from.values, a.value_size, rows.end - rows.begin);
  }
  Row row = run.at(0);
  for (int64_t r = 0; r < run.rows; ++r, row.next())
    kernels.finish(a, row.token, row.head, total.maximum[r], total.sum[r], total.values + r * width);
}

Run run_of(const AttentionArgs& a, const Found& f, int64_t index) {
  const int64_t most = tile_rows(a), kv_heads = f.sequence.kv_heads;
  const int64_t kv_head = f.sequence.kv_head + index % kv_heads;
  const HeadRange heads(a, kv_head);
  // The last rows of a prompt see the most keys.  They come first, so that no phase ends with a long tile.
  const int64_t row = (f.sequence.row_tiles - 1 - index / kv_heads) * most;
  const int64_t rows = f.sequence.tokens * heads.count() - row;
  return Run{a, f, kv_head, heads, row, std::clamp<int64_t>(rows, 0, most)};
}

Piece piece_of(const AttentionArgs& a, const Found& f, int64_t index) {
  const Sequence& s = f.sequence;
  const int64_t parts = s.split_tiles();
  const Run run = run_of(a, f, index / parts);
  if (run.rows == 0) return {run, 0, 0};
  if (!s.spread) return {run, run.first_split(), run.end_split()};
  const int64_t begin = s.first_split + index % parts * s.splits_a_tile;
  return {run, std::max(begin, run.first_split()), std::min(begin + s.splits_a_tile, run.end_split())};
}

int64_t pieces_of(const AttentionArgs& a) {
  if (a.sequences > kIndexed) return static_cast<const Place*>(a.scratch)[a.sequences].piece;
  Place at;
  for (int64_t b = 0; b < a.sequences; ++b) at = after(a, sequence_of(a, b, at), at);
  return at.piece;
}

// A cursor over pieces: finds a piece and then advances to later ones.
struct Walk {
  const AttentionArgs& a;
  Found found;
  int64_t index;  // of the piece within its sequence

  explicit Walk(const AttentionArgs& args, int64_t piece)
      : a(args), found(find(args, &Place::piece, piece)), index(piece - found.place.piece) {}
  Piece piece() const { return piece_of(a, found, index); }
  void advance_to(int64_t piece) {
    if (a.sequences > kIndexed) found = find(a, &Place::piece, piece);
    while (piece >= found.place.piece + pieces_of(found.sequence)) {
      found.place = after(a, found.sequence, found.place);
      found.sequence = sequence_of(a, ++found.index, found.place);
    }
    index = piece - found.place.piece;
  }
};

void attend_piece(const Walk& at, bool is_near, const SplitAhead& next) {
  (at.found.sequence.spread ? attend_splits : attend_rows)(at.piece(), is_near, next);
}

// One worker's share of a decode step.  The worker takes its next piece before it attends to the current one,
// so that the kernel can prefetch the next keys.  Near the end it does not, because another thread would be
// left without work.
void attend_pieces(const AttentionArgs& a, std::atomic<int64_t>& taken) {
  const int64_t all = pieces_of(a);
  int64_t piece = taken.fetch_add(1, std::memory_order_relaxed);
  if (piece >= all) return;
  Walk here(a, piece);
  for (bool is_near = false;;) {
    Walk there = here;
    SplitAhead next;
    const bool takes = taken.load(std::memory_order_relaxed) + a.threads <= all;
    if (takes && (piece = taken.fetch_add(1, std::memory_order_relaxed)) < all) {
      there.advance_to(piece);
      next = there.piece().first();
    }
    attend_piece(here, is_near, next);
    is_near = takes;
    if (!takes && (piece = taken.fetch_add(1, std::memory_order_relaxed)) < all) there.advance_to(piece);
    if (piece >= all) return;
    here.found = there.found, here.index = there.index;
  }
}

// True for a decode step: one token per sequence or part.  In prefill, the many rows of a piece reuse the
// keys that the first rows load, so pieces are not prefetched.
bool is_step(const AttentionArgs& a) {
  return a.parts != nullptr ? a.single_tokens : a.tokens == a.sequences;
}

}  // namespace

int64_t PagedAttention::scratch_bytes(const AttentionArgs& a) {
  if (a.max_seq_len <= kSplit || a.kv_heads == 0) return index_bytes(a);
  // Only sequences with few rows are spread.
  const int64_t most = a.sequences * kSpreadTiles * variant().attention->tile_rows(a) / group_of(a);
  const int64_t tokens = a.tokens < most ? a.tokens : most;
  const int64_t floats =
      tokens * a.kv_heads * group_of(a) * ceil_div(a.max_seq_len, kSplit) * partial_width(a);
  return index_bytes(a) +
         (floats < kPartialFloats ? floats : kPartialFloats) * static_cast<int64_t>(sizeof(float));
}

int64_t PagedAttention::tiles(int phase) const {
  if (phase == 0) return args.sequences > kIndexed ? 1 : 0;
  if (phase == 1 && is_step(args)) return args.threads;
  if (phase == 2 && args.max_seq_len <= kSplit) return 0;
  Place at;
  for (int64_t b = 0; b < args.sequences; ++b) at = after(args, sequence_of(args, b, at), at);
  return phase == 1 ? at.piece : at.merge;
}

void PagedAttention::tile(int phase, int64_t index) {
  if (phase == 0) {
    Place* places = static_cast<Place*>(args.scratch);
    places[0] = Place{};
    for (int64_t b = 0; b < args.sequences; ++b)
      places[b + 1] = after(args, sequence_of(args, b, places[b]), places[b]);
    return;
  }
  if (phase == 1) {
    if (!is_step(args)) return attend_piece(Walk(args, index), false, SplitAhead{});
    attend_pieces(args, taken_);
    if (over_.fetch_add(1, std::memory_order_acq_rel) + 1 == args.threads) taken_ = over_ = 0;
  } else {
    const Found f = find(args, &Place::merge, index);
    merge_rows(run_of(args, f, index - f.place.merge));
  }
}

}  // namespace armllm
