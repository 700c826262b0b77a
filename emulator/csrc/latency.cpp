// SPDX-License-Identifier: MIT
// Memory operations that take effect as late as the waits allow, or at some moment before.
//
// A deferred operation keeps the registers that it reads and runs its handler when a wait covers
// it; until then its destination holds poison. LDS operations of a wave keep their order, scalar
// loads have none. Vector memory operations reach memory in the order in which the workgroup issued
// them: its waves share a compute unit and that one's path, so the memory model asks for no vmcnt
// at a barrier (threadgroup split mode apart).
#include <algorithm>

#include "machine.h"

namespace emu {
namespace {

using Row = Deferred::Row;

// Loads have no data operand.
bool stores(const Inst& in) { return in.data.code >= 0; }
bool in_vm(const Inst& in) { return in.kind > kDs; }

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

// Runs the handler on the registers as they were, and puts the others back. With `hide` the wave
// does not see the result yet.
void take_effect(Wave& w, Deferred& d, bool hide) {
  const Inst& in = *d.inst;
  u64 exec = w.exec();
  w.set_pair(kExecLo, d.exec);
  for (auto& [code, value] : d.scalars) std::swap(w.s[code], value);
  for (auto& [code, row] : d.vectors) std::swap_ranges(row.begin(), row.end(), w.vgpr(code));
  w.landing = &d;
  in.run(w, in);
  w.landing = nullptr;
  d.landed = true;
  // Backwards: a register that is two operands was kept twice.
  for (auto it = d.scalars.rbegin(); it != d.scalars.rend(); ++it)
    if (!writes(in, it->first)) w.s[it->first] = it->second;
  for (auto it = d.vectors.rbegin(); it != d.vectors.rend(); ++it)
    for (int l = 0; l < kLanes; ++l)
      if (!writes(in, it->first) || !((d.exec >> l) & 1)) w.vgpr(it->first)[l] = it->second[l];
  d.vectors.clear();
  w.set_pair(kExecLo, exec);
  if (!hide || in.merges) return;
  for (int i = 0; i < in.dst.dwords; ++i) {
    Row row;
    std::copy_n(w.vgpr(in.dst.code + i), kLanes, row.data());
    d.result.push_back(row);
  }
  poison(w, d);
}

void show(Wave& w, const Deferred& d) {
  for (size_t i = 0; i < d.result.size(); ++i)
    for (int l = 0; l < kLanes; ++l)
      if ((d.exec >> l) & 1) w.vgpr(d.inst->dst.code + int(i))[l] = d.result[i][size_t(l)];
}

// What the workgroup issued before and memory must see first: for a store everything, for a load
// the stores, and what those ask for.
void take_effect_in_order(Wave& w, Deferred& d, bool hide) {
  auto& issued = w.wg->issued;
  if (in_vm(*d.inst)) {
    size_t end = 0, last = 0;
    for (; issued[end].second.get() != &d; ++end)
      if (!issued[end].second->landed && stores(*issued[end].second->inst)) last = end + 1;
    if (stores(*d.inst)) last = end;
    for (size_t i = 0; i < last; ++i)
      if (!issued[i].second->landed) take_effect(*issued[i].first, *issued[i].second, true);
  }
  take_effect(w, d, hide);
  while (!issued.empty() && issued.front().second->landed) issued.pop_front();
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
  for (const Operand* o :
       {&in.src[0], &in.src[1], &in.src[2], &in.data, &in.addr, &in.saddr, &in.soffset})
    keep(w, d, *o);
  keep(w, d, Operand{kM0, 1});
  op.smem = op.scalar = in.kind == kSmem;
  if (in.dst.code >= 0) op.reg = in.dst.code - (op.scalar ? 0 : kVgpr), op.count = in.dst.dwords;
  poison(w, d);
  if (vm) w.wg->issued.emplace_back(&w, op.deferred);
  issued(w, vm, lgkm, std::move(op));
}

void release(Wave& w, Outstanding& op, bool vm) {
  Deferred& d = *op.deferred;
  --d.queues;
  // Flat: in the order of memory, but its result counts on lgkmcnt as well.
  if (!d.landed && (vm || !in_vm(*d.inst)))
    take_effect_in_order(w, d, d.queues > 0);
  else if (!d.queues)
    show(w, d);
}

void land_some(Wave& w) {
  constexpr u32 kOneIn = 8;  // instructions
  if (w.random() % kOneIn) return;
  auto& queue = w.random() % 2 ? w.vm_queue : w.lgkm_queue;
  if (queue.empty()) return;
  auto waits = [](const Outstanding& op) { return op.deferred && !op.deferred->landed; };
  Outstanding& any = queue[w.random() % queue.size()];
  if (any.smem) {
    if (waits(any)) take_effect(w, *any.deferred, false);
    return;
  }
  for (auto& op : queue) {
    if (op.smem || !waits(op)) continue;
    // A flat operation keeps its place among the vector memory operations.
    if (&queue == &w.vm_queue || !in_vm(*op.deferred->inst))
      take_effect_in_order(w, *op.deferred, false);
    return;
  }
}

}  // namespace emu
