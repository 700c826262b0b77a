// SPDX-License-Identifier: MIT
// Memory operations that take effect as late as the waits allow, or at some moment before.
//
// A deferred operation keeps the registers that it reads and runs its handler when a wait covers it;
// until then its destination holds poison. Vector memory operations of a wave keep their order, LDS
// operations keep theirs, scalar loads have none.
#include <algorithm>

#include "machine.h"

namespace emu {
namespace {

using Row = std::array<u32, kLanes>;

bool is_vector(const Operand& o) { return o.code >= kVgpr; }
bool writes(const Inst& in, int code) {
  return code >= in.dst.code && code < in.dst.code + in.dst.dwords;
}

void keep(Wave& w, Deferred& d, const Operand& o) {
  for (int code = o.code; code >= 0 && code < o.code + o.dwords; ++code) {
    if (is_vector(o)) {
      Row row;
      std::copy_n(w.vgpr(code), kLanes, row.data());
      d.vectors.emplace_back(code, row);
    } else if (code < 128) {
      d.scalars.emplace_back(code, w.s[code]);
    }
  }
}

void poison(Wave& w, const Deferred& d) {
  const Inst& in = *d.inst;
  if (in.merges) return;
  for (int code = in.dst.code; code >= 0 && code < in.dst.code + in.dst.dwords; ++code) {
    if (is_vector(in.dst)) {
      for (int l = 0; l < kLanes; ++l)
        if ((d.exec >> l) & 1) w.vgpr(code)[l] = kPoison;
    } else {
      w.s[code] = kPoison;
    }
  }
}

// Runs the handler on the registers as they were, and puts the others back.
void take_effect(Wave& w, Outstanding& op) {
  Deferred& d = *op.deferred;
  const Inst& in = *d.inst;
  u64 exec = w.exec();
  w.set_pair(kExecLo, d.exec);
  for (auto& [code, value] : d.scalars) std::swap(w.s[code], value);
  for (auto& [code, row] : d.vectors) std::swap_ranges(row.begin(), row.end(), w.vgpr(code));
  w.landing = &op;
  in.run(w, in);
  w.landing = nullptr;
  d.landed = true;
  // Backwards: a register that is two operands was kept twice.
  for (auto it = d.scalars.rbegin(); it != d.scalars.rend(); ++it)
    if (!writes(in, it->first)) w.s[it->first] = it->second;
  for (auto it = d.vectors.rbegin(); it != d.vectors.rend(); ++it)
    for (int l = 0; l < kLanes; ++l)
      if (!writes(in, it->first) || !((d.exec >> l) & 1)) w.vgpr(it->first)[l] = it->second[l];
  w.set_pair(kExecLo, exec);
}

}  // namespace

bool defers(const Inst& in) {
  // A scalar store has no result; it takes effect at once.
  return in.kind == kSmem ? in.dst.code >= 0 : in.kind >= kDs;
}

void defer(Wave& w, const Inst& in) {
  bool lgkm = in.kind == kSmem || in.kind == kDs || in.kind == kFlat;
  bool vm = in.kind != kSmem && in.kind != kDs;
  Outstanding op;
  op.deferred = std::make_shared<Deferred>();
  Deferred& d = *op.deferred;
  d.inst = &in, d.exec = w.exec(), d.queues = vm + lgkm;
  for (const Operand* o : {&in.src[0], &in.src[1], &in.src[2], &in.data, &in.addr, &in.saddr,
                           &in.soffset})
    keep(w, d, *o);
  keep(w, d, Operand{kM0, 1});
  op.smem = op.scalar = in.kind == kSmem;
  if (in.dst.code >= 0)
    op.reg = in.dst.code - (op.scalar ? 0 : kVgpr), op.count = in.dst.dwords;
  poison(w, d);
  issued(w, vm, lgkm, std::move(op));
}

void release(Wave& w, Outstanding& op, bool vm) {
  Deferred& d = *op.deferred;
  const Inst& in = *d.inst;
  --d.queues;
  if (vm || in.kind != kFlat) {
    if (d.landed) return;
    take_effect(w, op);
    if (!d.queues) return;
    // Flat: in memory's order now, but its result counts on lgkmcnt as well.
    for (int i = 0; i < in.dst.dwords; ++i) {
      Row row;
      std::copy_n(w.vgpr(in.dst.code + i), kLanes, row.data());
      d.result.push_back(row);
    }
    poison(w, d);
  } else {
    for (size_t i = 0; i < d.result.size(); ++i)
      for (int l = 0; l < kLanes; ++l)
        if ((d.exec >> l) & 1) w.vgpr(in.dst.code + int(i))[l] = d.result[i][size_t(l)];
  }
}

void land_some(Wave& w) {
  constexpr u32 kOneIn = 8;  // instructions
  if (w.random() % kOneIn) return;
  auto& queue = w.random() % 2 ? w.vm_queue : w.lgkm_queue;
  if (queue.empty()) return;
  auto ready = [](const Outstanding& op) { return op.deferred && !op.deferred->landed; };
  Outstanding& any = queue[w.random() % queue.size()];
  if (any.smem) {
    if (ready(any)) take_effect(w, any);
    return;
  }
  for (auto& op : queue) {
    if (op.smem || !ready(op)) continue;
    // A flat operation keeps its place among the vector memory operations.
    if (&queue == &w.vm_queue || op.deferred->inst->kind != kFlat) take_effect(w, op);
    return;
  }
}

}  // namespace emu
