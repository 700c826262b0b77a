// SPDX-License-Identifier: MIT
// Checks: registers written and arrived before use, LDS races, LDS bytes that nothing wrote.
#include <algorithm>

#include "machine.h"

namespace emu {
namespace {

std::string reg_name(int r) { return (r < 256 ? "v" : "a") + std::to_string(r % 256); }
std::string sreg_name(int r) {
  if (r == kVccLo || r == kVccHi) return "vcc";
  if (r == kM0) return "m0";
  if (r >= kExecLo) return "exec";
  return "s" + std::to_string(r);
}
bool sdefined(const Wave& w, int r) { return (w.sdefined[size_t(r) / 64] >> (r % 64)) & 1; }

// The oldest load under way into register r.
Access load_into(const std::vector<Outstanding>& queue, const Wave& w, int r, bool scalar) {
  for (auto& op : queue)
    if (op.scalar == scalar && r >= op.reg && r < op.reg + op.count) return {op.index, w.id};
  return {};
}
[[noreturn]] void missing_wait(const std::string& what, Access load) {
  Fault f("missing wait", what);
  f.earlier = load;
  throw f;
}
void not_pending(const Wave& w, int r, const char* verb, bool vm_in_order = false) {
  if (w.vm_pending[size_t(r)] && !vm_in_order)
    missing_wait(std::string(verb) + " " + reg_name(r) +
                     " while a vector memory load into it is under way (s_waitcnt vmcnt)",
                 load_into(w.vm_queue, w, r, false));
  if (w.lgkm_pending[size_t(r)])
    missing_wait(std::string(verb) + " " + reg_name(r) +
                     " while an LDS or flat load into it is under way (s_waitcnt lgkmcnt)",
                 load_into(w.lgkm_queue, w, r, false));
}
void s_not_pending(const Wave& w, int r, const char* verb) {
  if (w.s_pending[size_t(r)])
    missing_wait(std::string(verb) + " " + sreg_name(r) +
                     " while a scalar load into it is under way (s_waitcnt lgkmcnt)",
                 load_into(w.lgkm_queue, w, r, true));
}

// The registers of source i that the instruction uses: packed f32 may take one dword of a pair
// twice, and compilers make 32-bit sums with v_mad_u64_u32, the upper half of the addend undefined.
Operand used(const Inst& in, int i) {
  Operand o = in.src[i];
  if (in.flags & kLowSum && i == 2) return Operand{o.code, std::min(o.dwords, 1)};
  if (in.kind != kVop3p || o.dwords != 2) return o;
  int lo = int(in.opsel >> i) & 1, hi = int(in.opsel_hi >> i) & 1;
  if (in.flags & kLenient) hi = lo;  // v_pk_mov_b32: one dword of each source
  return lo == hi
             ? Operand{o.code < 0 || (o.code >= 128 && o.code < kVgpr) ? o.code : o.code + lo, 1}
             : o;
}

// All lanes in which every register of the operand is written.
u64 written(Wave& w, const Operand& o) {
  u64 ok = kAllLanes;
  if (o.code >= kVgpr) {
    for (int i = 0; i < o.dwords; ++i) ok &= w.defined[size_t(o.code - kVgpr + i)];
  } else if (o.code >= 0 && o.code < 128) {
    for (int i = 0; i < o.dwords; ++i)
      if (!sdefined(w, o.code + i)) ok = 0;
  }
  return ok;
}
void read(Wave& w, const Operand& o, u64 lanes, bool lenient) {
  if (o.code < 0) return;
  if (o.code >= kVgpr) {
    for (int i = 0; i < o.dwords; ++i) {
      int r = o.code - kVgpr + i;
      not_pending(w, r, "reads");
      u64 missing = lanes & ~w.defined[size_t(r)];
      if (missing && !lenient)
        throw Fault("uninitialized register", "reads " + reg_name(r) + ", which nothing wrote",
                    __builtin_ctzll(missing));
    }
  } else if (o.code < 128) {
    for (int i = 0; i < o.dwords && o.code + i < 128; ++i) {
      s_not_pending(w, o.code + i, "reads");
      if (!lenient && !sdefined(w, o.code + i))
        throw Fault("uninitialized register",
                    "reads " + sreg_name(o.code + i) + ", which nothing wrote");
    }
  } else if (o.code == kVccz) {
    s_not_pending(w, kVccLo, "reads");
  }
}
// A vector memory load may overwrite the target of another: they return in order.
void overwrite(Wave& w, const Operand& o, bool in_order) {
  for (int i = 0; i < o.dwords; ++i) {
    if (o.code >= kVgpr)
      not_pending(w, o.code - kVgpr + i, "overwrites", in_order);
    else if (o.code >= 0 && o.code + i < 128)
      s_not_pending(w, o.code + i, "overwrites");
  }
}

void mark(Wave& w, const Operand& o, u64 lanes, bool good) {
  if (o.code >= kVgpr) {
    for (int i = 0; i < o.dwords; ++i) {
      u64& d = w.defined[size_t(o.code - kVgpr + i)];
      d = good ? d | lanes : d & ~lanes;
    }
  } else if (o.code >= 0 && o.code < 128) {
    for (int i = 0; i < o.dwords && o.code + i < 128; ++i) {
      u64& d = w.sdefined[size_t(o.code + i) / 64];
      u64 bit = 1ull << ((o.code + i) % 64);
      d = good ? d | bit : d & ~bit;
    }
  }
}

}  // namespace

void before(Wave& w, const Inst& in) {
  u64 lanes = in.flags & kAllLanesUsed ? kAllLanes : w.exec();
  bool lenient = in.flags & (kLenient | kOwnCheck);
  for (int i = 0; i < 3; ++i) read(w, used(in, i), lanes, lenient);
  read(w, in.addr, lanes, false);
  read(w, in.data, lanes, false);
  read(w, in.saddr, lanes, false);
  read(w, in.soffset, lanes, false);
  if (in.scale0 >= 0) read(w, Operand{in.scale0, 1}, lanes, false);
  if (in.scale1 >= 0) read(w, Operand{in.scale1, 1}, lanes, false);
  overwrite(w, in.dst, in.kind == kGlobal || in.kind == kScratch || in.kind == kMubuf);
  overwrite(w, in.sdst, false);
  for (const Operand* o : {&in.src[0], &in.src[1], &in.src[2], &in.addr, &in.data, &in.dst}) {
    if (o->code < kVgpr) continue;
    bool acc = o->code >= kAgpr;
    u32 last = u32(o->code + o->dwords - (acc ? kAgpr : kVgpr)),
        have = acc ? w.launch().acc_vgprs : w.launch().arch_vgprs;
    if (last > have)
      throw Fault("register out of range",
                  "uses " + reg_name(o->code - kVgpr + o->dwords - 1) +
                      ", but the kernel was given " + std::to_string(have) +
                      (acc ? " accumulation registers" : " vector registers"));
  }
}

void after(Wave& w, const Inst& in) {
  if (in.flags & kOwnCheck) {
    if (in.dst.code >= 0 && in.dst.code < 128) mark(w, in.dst, 0, true);
    return;
  }
  u64 lanes = in.flags & kAllLanesUsed ? kAllLanes : w.exec();
  if (in.flags & kLenient) {
    if (in.dst.code < kVgpr) {
      u64 ok = kAllLanes;
      for (int i = 0; i < 3; ++i) ok &= written(w, used(in, i));
      mark(w, in.dst, 0, ok != 0);
    } else {
      u64 good = kAllLanes;
      for (int i = 0; i < 3; ++i) good &= written(w, used(in, i));
      mark(w, in.dst, lanes & good, true);
      mark(w, in.dst, lanes & ~good, false);
    }
  } else {
    u64 high = in.flags & kLowSum ? written(w, in.src[2]) : kAllLanes;
    mark(w, in.dst, lanes, true);
    if (~high & lanes) mark(w, Operand{in.dst.code + 1, 1}, ~high & lanes, false);
  }
  mark(w, in.sdst, lanes, true);
}

void read_scalar(Wave& w, const Operand& o) { read(w, o, 0, false); }
void write_scalar(Wave& w, const Operand& o) {
  overwrite(w, o, false);
  mark(w, o, 0, true);
}

namespace {

void add_pending(Wave& w, const Outstanding& op, bool vm, int step) {
  for (int i = 0; i < op.count; ++i) {
    size_t r = size_t(op.reg + i);
    u8& n = op.scalar ? w.s_pending[r] : vm ? w.vm_pending[r] : w.lgkm_pending[r];
    n = u8(n + step);
  }
}
// The bytes count as written in this phase, whenever the operation was issued.
void written_now(Wave& w, u32 index, const std::vector<Range>& ranges) {
  for (auto& range : ranges)
    for (u32 b = range.first; b < range.second; ++b) {
      LdsMark& m = w.wg->marks[b];
      m.pending = m.atomic = m.same = false;
      m.write_phase = w.wg->phase + 1;
      m.writers = u16(1u << w.id);
      w.wg->history[b].writes.first = Access{index, w.id};
    }
}
void retire(Wave& w, Outstanding& op, bool vm) {
  if (op.deferred) release(w, op, vm);
  add_pending(w, op, vm, -1);
  written_now(w, op.index, op.deferred ? op.deferred->dma : op.dma);
}

}  // namespace

void issued(Wave& w, bool vm, bool lgkm, Outstanding op) {
  if (w.landing) {  // it counts since it was deferred
    w.landing->dma = std::move(op.dma), w.landing->lds_writes = std::move(op.lds_writes);
    return;
  }
  op.index = w.current();
  if (vm) {
    add_pending(w, op, true, 1);
    w.vm_queue.push_back(op);
    // NOTE: at most 63 operations fit in vmcnt; issue stalls until one leaves, and compilers rely
    // on that.
    if (w.vm_queue.size() > 63) {
      retire(w, w.vm_queue.front(), true);
      w.vm_queue.erase(w.vm_queue.begin());
    }
  }
  if (lgkm) {
    if (vm) op.dma.clear();
    add_pending(w, op, false, 1);
    w.lgkm_queue.push_back(std::move(op));
    if (w.lgkm_queue.size() > 15 && !w.lgkm_queue.front().smem) {
      retire(w, w.lgkm_queue.front(), false);
      w.lgkm_queue.erase(w.lgkm_queue.begin());
    }
  }
}

void waited(Wave& w, u32 vm, u32 lgkm) {
  while (w.vm_queue.size() > vm) {
    retire(w, w.vm_queue.front(), true);
    w.vm_queue.erase(w.vm_queue.begin());
  }
  if (w.lgkm_queue.size() <= lgkm) return;
  // LDS operations return in order, scalar loads in any order: those are certain only at 0.
  std::vector<Outstanding> left;
  size_t in_order = 0;
  for (auto& op : w.lgkm_queue) in_order += !op.smem;
  for (auto& op : w.lgkm_queue) {
    bool done = lgkm == 0 || (!op.smem && in_order > lgkm);
    if (!op.smem) --in_order;
    if (done)
      retire(w, op, false);
    else
      left.push_back(std::move(op));
  }
  w.lgkm_queue = std::move(left);
}

void lds_filling(Wave& w, u32 begin, u32 size) {
  written_now(w, w.current(), {{begin, begin + size}});
  for (u32 b = begin; b < begin + size; ++b) w.wg->marks[b].pending = true;
}

// A DS write that was not waited for may land after the barrier: it counts for the next phase as
// well.
void passed_barrier(Wave& w) {
  for (auto& op : w.lgkm_queue)
    written_now(w, op.index, op.deferred ? op.deferred->lds_writes : op.lds_writes);
}

namespace {

[[noreturn]] void race(const std::string& verb, const std::string& what, Access earlier, int lane,
                       u32 byte) {
  Fault f("LDS race",
          verb + " LDS that wave " + std::to_string(earlier.wave) + " " + what +
              " with no barrier between",
          lane, byte);
  f.earlier = earlier;
  throw f;
}
[[noreturn]] void still_filling(const LdsHistory& history, int lane, u32 byte) {
  Fault f("missing wait", "touches LDS that an LDS-DMA load is still filling", lane, byte);
  f.earlier = history.writes.by_another(-1);
  throw f;
}
// Adds an access of this phase.
inline void note(u32& phase, u16& waves, LdsAccesses& accesses, u32 now, u16 mine,
                 const Access& me) {
  if (phase != now) {
    phase = now, waves = mine;
    accesses.first = me;
  } else if (!(waves & mine)) {
    waves |= mine;
    accesses.other = me;
  }
}

}  // namespace

void lds_read(Wave& w, u32 begin, u32 size, int lane) {
  Workgroup& g = *w.wg;
  const u32 now = g.phase + 1;
  const Access me{w.current(), w.id};
  const u16 mine = u16(1u << w.id);
  LdsMark* marks = g.marks.data();
  LdsHistory* history = g.history.data();
  for (u32 b = begin; b < begin + size; ++b) {
    LdsMark& m = marks[b];
    if (m.pending) still_filling(history[b], lane, b);
    if (!m.defined) throw Fault("uninitialized LDS", "reads LDS that nothing wrote", lane, b);
    if (m.write_phase == now && m.writers != mine) {
      const bool agree = !m.atomic && (m.same || (m.writers & mine));
      if (!agree) race("reads", "wrote", history[b].writes.by_another(w.id), lane, b);
    }
    note(m.read_phase, m.readers, history[b].reads, now, mine, me);
  }
}

void lds_write(Wave& w, u32 begin, u32 size, int lane, bool atomic, const u8* value) {
  Workgroup& g = *w.wg;
  const u32 now = g.phase + 1;
  const Access me{w.current(), w.id};
  const u16 mine = u16(1u << w.id);
  if (w.launch().strict_races) value = nullptr;
  LdsMark* marks = g.marks.data();
  LdsHistory* history = g.history.data();
  const u8* lds = g.lds.data();
  for (u32 b = begin; b < begin + size; ++b) {
    LdsMark& m = marks[b];
    if (m.pending) still_filling(history[b], lane, b);
    if (atomic && !m.defined)
      throw Fault("uninitialized LDS", "reads LDS that nothing wrote", lane, b);
    // NOTE: replicated layouts store one value from several waves; the order does not matter then.
    const bool unchanged = value && m.defined && lds[b] == value[b - begin];
    const bool both_atomic = atomic && m.atomic;
    if (m.write_phase == now && m.writers != mine && !both_atomic && (m.atomic || !unchanged))
      race("writes", "wrote", history[b].writes.by_another(w.id), lane, b);
    if (m.read_phase == now && m.readers != mine && !both_atomic && !unchanged)
      race("writes", "read", history[b].reads.by_another(w.id), lane, b);
    m.same = unchanged && (m.write_phase != now || m.same);
    note(m.write_phase, m.writers, history[b].writes, now, mine, me);
    m.atomic = atomic;
    m.defined = true;
  }
}

}  // namespace emu
