// SPDX-License-Identifier: MIT
// moe_sort: a counting sort of routes by local expert. Stable, and nothing depends on the order in
// which workgroups, waves or atomics run: each wave owns consecutive routes, ranks them by ballots
// and adds what waves and workgroups before it have counted.
//
// Few routes: one workgroup does all of it, the others zero a buffer meanwhile. Many: count, sum
// and place are a launch each (core/moe_sort_plan.h).
#include "core/moe_sort_plan.h"
#include "hip/arch/arch.h"
#include "hip/arch/launch.h"
#ifndef RQ_DEVICE_ONLY
#include "hip/backend.h"
#endif

namespace rotquant::hip {

constexpr uint32_t kWaves = 16, kLanes = arch::kWaveSize, kThreads = kWaves * kLanes;
constexpr uint32_t kSteps = kMoeSortTile / kThreads;  // of a lane in a tile

static_assert(kThreads * kSteps == kMoeSortTile && kMoeSortStep % kThreads == 0);
static_assert(kMoeMaxExperts <= 2 * kThreads, "a thread owns experts 2 i and 2 i + 1");
static_assert(kMoeSortTile < 1 << 16, "counts of a tile are 16 bits");
static_assert(kMoeMaxTokens * kMoeMaxTopk < int64_t{1} << 31, "routes are 32 bits");

struct MoeSortArgs {
  MoeSortParams params;
  int groups, routes_per_group;
  int grid;  // workgroups of the launch
  int log2_block_m;
  int id_bits;  // that tell local experts apart, at least 1
  uint64_t topk_reciprocal;
};

struct Shared {
  alignas(16) uint16_t counts[kWaves][kMoeMaxExperts];  // of a tile's routes; then of those before
  uint32_t starts[kMoeMaxExperts];  // row of an expert's next route that no tile has had yet
  uint32_t sums[kWaves];
  int16_t local_of[kMoeMaxExperts];  // -1: not local
};

struct Two {
  uint32_t even, odd;
};

RQ_DEVICE uint32_t wave_index() { return arch::uniform(arch::thread_index() / kLanes); }
RQ_DEVICE uint32_t lane_index() { return arch::thread_index() % kLanes; }
RQ_DEVICE uint32_t local_experts(const MoeSortParams& p) {
  return static_cast<uint32_t>(p.local_experts);
}

// --- building blocks --------------------------------------------------------------------------

struct Sum {
  uint32_t before, all;
};

// Over the threads of the workgroup. NOTE: a barrier before the next use.
RQ_DEVICE Sum workgroup_sum(uint32_t value, uint32_t (&sums)[kWaves]) {
  const uint32_t through = arch::prefix_sum(value), wave = wave_index();
  if (lane_index() == kLanes - 1) sums[wave] = through;
  arch::barrier();
  const uint32_t through_wave = arch::prefix_sum(lane_index() < kWaves ? sums[lane_index()] : 0);
  const uint32_t before_wave =
      arch::read_lane(through_wave, wave) - arch::read_lane(through, kLanes - 1);
  return {before_wave + through - value, arch::read_lane(through_wave, kLanes - 1)};
}

// Local ids number the experts of the mask, or are those of the map. False if the mask is none.
RQ_DEVICE bool number_local_experts(const MoeSortParams& p, Shared& lds) {
  const int e = 2 * static_cast<int>(arch::thread_index());
  const int last = p.experts - 1;
  if (p.expert_map) {
    for (int i = e; i <= last && i < e + 2; ++i) {
      const int local = p.expert_map[i];
      lds.local_of[i] = static_cast<int16_t>(local >= 0 && local < p.local_experts ? local : -1);
    }
    arch::barrier();
    return true;
  }
  if (!p.expert_mask) return true;
  const int32_t even_mask = p.expert_mask[e < last ? e : last];
  const int32_t odd_mask = p.expert_mask[e < last ? e + 1 : last];
  const int even = e <= last && even_mask, odd = e < last && odd_mask;
  const bool binary = (e > last || (even_mask & ~1) == 0) && (e >= last || (odd_mask & ~1) == 0);
  const uint32_t wrong = binary ? 0 : 1u << 16;  // above any sum of ones
  const Sum ones = workgroup_sum(static_cast<uint32_t>(even + odd) + wrong, lds.sums);
  const int local = static_cast<int>(ones.before & 0xFFFF);
  if (e <= last) lds.local_of[e] = even && local < p.local_experts ? local : -1;
  if (e < last) lds.local_of[e + 1] = odd && local + even < p.local_experts ? local + even : -1;
  arch::barrier();
  return ones.all < 1u << 16 && (p.mask_ones < 0 || static_cast<int>(ones.all) == p.mask_ones);
}

// -1 for a dropped route. Ids can be anything: a router makes them of rows that hold NaN too.
RQ_DEVICE int local_expert(const MoeSortParams& p, const Shared& lds, int32_t id) {
  if (id < 0 || id >= p.experts) return -1;
  if (p.expert_mask || p.expert_map) return lds.local_of[id];
  return id < p.local_experts ? id : -1;
}

// --- fill -------------------------------------------------------------------------------------

// A thread among all that fill together.
struct Share {
  int64_t index, count;
};

RQ_DEVICE void fill(void* data, int64_t bytes, uint32_t word, const Share& share) {
  const arch::u32x4 value{word, word, word, word};
  for (int64_t i = share.index; i < bytes / 16; i += share.count)
    arch::store(static_cast<uint8_t*>(data) + 16 * i, value);
}

// Any alignment, any size.
RQ_DEVICE void fill_zero(const MoeSortParams& p, const Share& share) {
  uint8_t* data = static_cast<uint8_t*>(p.zero);
  int64_t bytes = p.zero_bytes;
  const auto unaligned = static_cast<int64_t>(-reinterpret_cast<uintptr_t>(data) % 16);
  const int64_t head = unaligned < bytes ? unaligned : bytes;
  if (share.index < head) data[share.index] = 0;
  data += head, bytes -= head;
  fill(data, bytes, 0, share);
  if (share.index < bytes % 16) data[bytes - 1 - share.index] = 0;
}

// Every row as if it were padding, every block as if it were past the end: where there are routes,
// place() overwrites it.
RQ_DEVICE void fill_outputs(const MoeSortArgs& args, const Share& share) {
  const MoeSortParams& p = args.params;
  const auto padding = static_cast<uint32_t>(moe_sorted_id(p.tokens, p.topk));
  fill(p.sorted_ids, 4 * p.max_rows, padding, share);
  fill(p.sorted_weights, 4 * p.max_rows, 0, share);
  for (int64_t i = share.index; i < p.max_rows >> args.log2_block_m; i += share.count)
    p.sorted_expert_ids[i] = -1;
}

// --- sort -------------------------------------------------------------------------------------

// A lane's routes of a tile. A wave owns consecutive ones, 64 a step.
struct Routes {
  uint32_t first, end;
  uint32_t steps;  // of this wave
  int32_t id[kSteps];
  float weight[kSteps];
  uint32_t expert[kSteps];  // local, kDropped
  uint32_t rank[kSteps];    // among the wave's routes of the same expert
};
constexpr uint32_t kDropped = 0xFFFF;

RQ_DEVICE uint32_t smaller(uint32_t a, uint32_t b) { return a < b ? a : b; }

RQ_DEVICE void load_routes(const MoeSortParams& p, uint32_t begin, uint32_t end, Routes& routes) {
  const uint32_t steps = (smaller(end - begin, kMoeSortTile) + kThreads - 1) / kThreads;
  const uint32_t first = begin + wave_index() * steps * kLanes;
  routes.steps = first < end ? smaller(steps, (end - first + kLanes - 1) / kLanes) : 0;
  routes.first = first + lane_index();
  routes.end = end;
  RQ_UNROLL
  for (uint32_t s = 0; s < kSteps; ++s) {
    const uint32_t route = routes.first + s * kLanes;
    const bool any = s < routes.steps && route < end;
    routes.id[s] = any ? p.topk_ids[route] : -1;
    routes.weight[s] = any ? p.topk_weights[route] : 0.0f;
  }
}

// Lanes with the same value of `bits` bits, among those with `any`.
RQ_DEVICE arch::LaneMask matching_lanes(bool any, uint32_t value, uint32_t bits) {
  arch::LaneMask same = arch::ballot(any);
  auto rest = static_cast<int32_t>(value << (32 - bits));  // the bit in question is the sign
  for (uint32_t bit = 0; bit < bits; ++bit, rest <<= 1)
    same &= ~(arch::ballot(rest < 0) ^ static_cast<arch::LaneMask>(rest >> 31));
  return same;
}

// counts[wave] of a tile, and each route's rank in it.
RQ_DEVICE void rank_routes(const MoeSortArgs& args, Shared& lds, Routes& routes) {
  const MoeSortParams& p = args.params;
  uint16_t (&counts)[kMoeMaxExperts] = lds.counts[wave_index()];
  for (uint32_t e = 2 * lane_index(); e < local_experts(p); e += 2 * kLanes)
    counts[e] = counts[e + 1] = 0;
  RQ_UNROLL
  for (uint32_t s = 0; s < kSteps; ++s) {
    routes.expert[s] = kDropped;
    routes.rank[s] = 0;
    if (s < routes.steps) {
      const int local = local_expert(p, lds, routes.id[s]);
      const bool any = local >= 0;
      const uint32_t expert = any ? static_cast<uint32_t>(local) : 0;
      const arch::LaneMask same = matching_lanes(any, expert, args.id_bits);
      const uint32_t before = arch::count_before(same);
      arch::wave_fence();
      if (any) {
        routes.expert[s] = expert;
        routes.rank[s] = counts[expert] + before;
      }
      arch::wave_fence();
      if (any && before + 1 == arch::count(same))  // the last of them knows the new count
        counts[expert] = static_cast<uint16_t>(routes.rank[s] + 1);
    }
  }
}

// NOTE: loads and stores share a counter that runs in order. Whoever waits for these loads only
// after stores waits for the stores too.
RQ_DEVICE void await_weights(Routes& routes) {
  RQ_UNROLL
  for (uint32_t s = 0; s < kSteps; ++s)
    routes.weight[s] = bits_to_float(arch::opaque(float_to_bits(routes.weight[s])));
}

// Of this thread's two experts: the counts of waves become those of the waves before. Returns the
// tile's.
RQ_DEVICE Two scan_waves(const MoeSortParams& p, Shared& lds) {
  uint32_t before = 0;  // two halves, neither of which overflows into the other
  if (2 * arch::thread_index() < local_experts(p)) {
    RQ_UNROLL
    for (uint32_t w = 0; w < kWaves; ++w) {
      uint16_t* pair = &lds.counts[w][2 * arch::thread_index()];
      uint32_t count;
      __builtin_memcpy(&count, pair, sizeof(count));
      __builtin_memcpy(pair, &before, sizeof(before));
      before += count;
    }
  }
  return {before & 0xFFFF, before >> 16};
}

// Where this thread's two experts start, from the number of their routes; `leader` writes how many
// rows there are in all.
RQ_DEVICE Two expert_starts(const MoeSortParams& p, Shared& lds, Two routes, bool leader) {
  const auto block = static_cast<uint32_t>(p.block_m);
  const uint32_t even = (routes.even + block - 1) & -block;
  const uint32_t odd = (routes.odd + block - 1) & -block;
  const Sum rows = workgroup_sum(even + odd, lds.sums);
  if (leader && arch::thread_index() == 0) {
    p.num_valid[0] = static_cast<int32_t>(rows.all);
    p.num_valid[1] = static_cast<int32_t>(p.tokens);
  }
  return {rows.before, rows.before + even};
}

RQ_DEVICE void set_starts(const MoeSortParams& p, Shared& lds, Two starts) {
  if (2 * arch::thread_index() >= local_experts(p)) return;
  lds.starts[2 * arch::thread_index()] = starts.even;
  lds.starts[2 * arch::thread_index() + 1] = starts.odd;
}

RQ_DEVICE void place(const MoeSortArgs& args, const Shared& lds, const Routes& routes, bool valid) {
  const MoeSortParams& p = args.params;
  const auto topk = static_cast<uint32_t>(p.topk);
  RQ_UNROLL
  for (uint32_t s = 0; s < kSteps; ++s) {
    const uint32_t route = routes.first + s * kLanes, expert = routes.expert[s];
    if (s >= routes.steps || route >= routes.end) continue;
    int32_t reverse = valid ? -1 : kMoeInvalid;
    if (expert != kDropped) {
      const uint32_t row = lds.starts[expert] + lds.counts[wave_index()][expert] + routes.rank[s];
      const uint32_t token = moe_sort_token(route, args.topk_reciprocal);
      p.sorted_ids[row] = moe_sorted_id(token, static_cast<int>(route - token * topk));
      p.sorted_weights[row] = valid ? routes.weight[s] : __builtin_nanf("");
      const uint32_t block = row >> args.log2_block_m;
      if (block << args.log2_block_m == row)  // every block in use begins with a route
        p.sorted_expert_ids[block] = static_cast<int32_t>(expert);
      if (valid) reverse = static_cast<int32_t>(row);
    }
    p.reverse_sorted[route] = reverse;
  }
}

// --- kernels ----------------------------------------------------------------------------------

RQ_GLOBAL RQ_LAUNCH_BOUNDS(kThreads,
                           kWaves / 4) void moe_sort_alone_kernel(const MoeSortArgs args) {
  RQ_SHARED Shared lds;
  const MoeSortParams& p = args.params;
  const int64_t thread = arch::thread_index();
  if (arch::block_index_x() > 0) {
    const int64_t others = args.grid - 1;
    return fill_zero(p,
                     {(arch::block_index_x() - 1) * int64_t{kThreads} + thread, others * kThreads});
  }
  Routes routes;
  load_routes(p, 0, static_cast<uint32_t>(p.tokens * p.topk), routes);
  const bool valid = number_local_experts(p, lds);
  rank_routes(args, lds, routes);
  await_weights(routes);
  fill_outputs(args, {thread, kThreads});
  arch::barrier();
  set_starts(p, lds, expert_starts(p, lds, scan_waves(p, lds), true));
  arch::barrier();
  place(args, lds, routes, valid);
}

// First of three: the routes of each workgroup by expert; and what place() does not write.
RQ_GLOBAL RQ_LAUNCH_BOUNDS(kThreads,
                           kWaves / 4) void moe_sort_count_kernel(const MoeSortArgs args) {
  RQ_SHARED Shared lds;
  RQ_SHARED uint32_t counts[kMoeMaxExperts];
  const MoeSortParams& p = args.params;
  const uint32_t group = arch::block_index_x(), thread = arch::thread_index();
  if (group < static_cast<uint32_t>(args.groups)) {
    for (uint32_t e = thread; e < kMoeMaxExperts; e += kThreads) counts[e] = 0;
    number_local_experts(p, lds);
    arch::barrier();
    const uint32_t begin = group * args.routes_per_group;
    const uint32_t end =
        smaller(begin + args.routes_per_group, static_cast<uint32_t>(p.tokens * p.topk));
    for (uint32_t route = begin + thread; route < end; route += kThreads) {
      const int expert = local_expert(p, lds, p.topk_ids[route]);
      if (expert >= 0) arch::add_lds(&counts[expert], 1);
    }
    arch::barrier();
    const int64_t columns = moe_sort_columns(p.local_experts);
    for (uint32_t e = thread; e < columns; e += kThreads)
      p.workspace[group * columns + e] = static_cast<int32_t>(counts[e]);
  }
  const Share share{group * int64_t{kThreads} + thread, args.grid * int64_t{kThreads}};
  fill_outputs(args, share);
  fill_zero(p, share);
}

// Second: counts of workgroups become those of the workgroups before, and the last row the sums. A
// lane has one expert, a wave consecutive workgroups.
RQ_GLOBAL RQ_LAUNCH_BOUNDS(kThreads, kWaves / 4) void moe_sort_sum_kernel(const MoeSortArgs args) {
  constexpr int kGroups = kMoeSortMaxGroups / kWaves;  // of a wave
  RQ_SHARED int32_t sums[kWaves][kLanes];
  const MoeSortParams& p = args.params;
  const auto columns = static_cast<int>(moe_sort_columns(p.local_experts));
  const int wave = static_cast<int>(wave_index()), first = wave * kGroups;
  int32_t* column = p.workspace + arch::block_index_x() * kLanes + lane_index();

  int32_t count[kGroups], sum = 0;
  RQ_UNROLL
  for (int i = 0; i < kGroups; ++i)
    count[i] = first + i < args.groups ? column[(first + i) * columns] : 0;
  RQ_UNROLL
  for (int i = 0; i < kGroups; ++i) sum += count[i];
  sums[wave][lane_index()] = sum;
  arch::barrier();
  int32_t before = 0;
  for (int w = 0; w < wave; ++w) before += sums[w][lane_index()];
  RQ_UNROLL
  for (int i = 0; i < kGroups; ++i) {
    if (first + i < args.groups) column[(first + i) * columns] = before;
    before += count[i];
  }
  if (wave == kWaves - 1) column[args.groups * columns] = before;
}

// Third.
RQ_GLOBAL RQ_LAUNCH_BOUNDS(kThreads,
                           kWaves / 4) void moe_sort_place_kernel(const MoeSortArgs args) {
  RQ_SHARED Shared lds;
  const MoeSortParams& p = args.params;
  const uint32_t group = arch::block_index_x(), e = 2 * arch::thread_index();
  const int64_t columns = moe_sort_columns(p.local_experts);
  const bool valid = number_local_experts(p, lds);
  Two all{0, 0}, before{0, 0};
  if (e < columns) {
    const int32_t* counts = p.workspace + e;
    const int32_t* total = counts + args.groups * columns;
    all = {static_cast<uint32_t>(total[0]), static_cast<uint32_t>(total[1])};
    counts += group * columns;
    before = {static_cast<uint32_t>(counts[0]), static_cast<uint32_t>(counts[1])};
  }
  Two starts = expert_starts(p, lds, all, group == 0);
  starts.even += before.even, starts.odd += before.odd;

  const uint32_t begin = group * args.routes_per_group;
  const uint32_t end =
      smaller(begin + args.routes_per_group, static_cast<uint32_t>(p.tokens * p.topk));
  for (uint32_t tile = begin; tile < end; tile += kMoeSortTile) {
    Routes routes;
    load_routes(p, tile, end, routes);
    rank_routes(args, lds, routes);
    await_weights(routes);
    arch::barrier();
    set_starts(p, lds, starts);
    const Two placed = scan_waves(p, lds);
    starts.even += placed.even, starts.odd += placed.odd;
    arch::barrier();
    place(args, lds, routes, valid);
  }
}

#ifndef RQ_DEVICE_ONLY
namespace {
constexpr int log2_up(int n) {
  int log2 = 0;
  while (1 << log2 < n) ++log2;
  return log2;
}
}  // namespace

void moe_sort(const MoeSortParams& params, hipStream_t stream) {
  require_current_device();
  const MoeSortPlan plan =
      plan_moe_sort(params.tokens * params.topk, params.max_rows, params.zero_bytes);
  const int threads = kWaves * current_wave_size();
  MoeSortArgs args{params,
                   static_cast<int>(plan.groups),
                   static_cast<int>(plan.routes_per_group),
                   static_cast<int>(plan.groups + plan.fill_groups),
                   log2_up(params.block_m),
                   params.local_experts < 2 ? 1 : log2_up(params.local_experts),
                   moe_sort_reciprocal(params.topk)};
  if (plan.alone) return launch(moe_sort_alone_kernel, args.grid, threads, args, stream);
  launch(moe_sort_count_kernel, args.grid, threads, args, stream);
  const auto columns = static_cast<int>(moe_sort_columns(params.local_experts));
  if (columns > 0)
    launch(moe_sort_sum_kernel, columns / current_wave_size(), threads, args, stream);
  launch(moe_sort_place_kernel, args.groups, threads, args, stream);
}
#endif

}  // namespace rotquant::hip
