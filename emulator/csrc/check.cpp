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

void not_pending(const Wave& w, int r, const char* verb, bool vm_in_order = false) {
  if (w.vm_pending[size_t(r)] && !vm_in_order)
    throw Fault("missing wait",
                std::string(verb) + " " + reg_name(r) +
                    " while a vector memory load into it is under way (s_waitcnt vmcnt)");
  if (w.lgkm_pending[size_t(r)])
    throw Fault("missing wait",
                std::string(verb) + " " + reg_name(r) +
                    " while an LDS or flat load into it is under way (s_waitcnt lgkmcnt)");
}
void s_not_pending(const Wave& w, int r, const char* verb) {
  if (w.s_pending[size_t(r)])
    throw Fault("missing wait",
                std::string(verb) + " " + sreg_name(r) +
                    " while a scalar load into it is under way (s_waitcnt lgkmcnt)");
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
void retire(Wave& w, const Outstanding& op, bool vm) {
  add_pending(w, op, vm, -1);
  Workgroup& g = *w.wg;
  for (auto& range : op.dma)
    for (u32 b = range.first; b < range.second; ++b) {
      g.marks[b].pending = 0;
      g.marks[b].write_phase = g.phase + 1;
      g.marks[b].writer = u8(w.id);
      g.marks[b].atomic = 0;
    }
}

}  // namespace

void issued(Wave& w, bool vm, bool lgkm, Outstanding op) {
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

// A DS write that was not waited for may land after the barrier: it counts for the next phase as
// well.
void passed_barrier(Wave& w) {
  for (auto& op : w.lgkm_queue)
    for (auto& range : op.lds_writes)
      for (u32 b = range.first; b < range.second; ++b) {
        w.wg->marks[b].write_phase = w.wg->phase + 1;
        w.wg->marks[b].writer = u8(w.id);
        w.wg->marks[b].atomic = 0;
      }
}

void lds_touch(Wave& w, u32 begin, u32 size, int lane, bool write, bool atomic) {
  Workgroup& g = *w.wg;
  u32 now = g.phase + 1;
  u16 me = u16(1u << w.id);
  for (u32 b = begin; b < begin + size; ++b) {
    LdsMark& m = g.marks[b];
    if (m.pending)
      throw Fault("missing wait", "touches LDS that an LDS-DMA load is still filling", lane, b);
    if ((!write || atomic) && !m.defined)
      throw Fault("uninitialized LDS", "reads LDS that nothing wrote", lane, b);
    if (m.write_phase == now && m.writer != w.id && !(atomic && m.atomic))
      throw Fault(
          "LDS race",
          "touches LDS that wave " + std::to_string(m.writer) + " wrote with no barrier between",
          lane, b);
    if (write && m.read_phase == now && (m.readers & ~me) && !(atomic && m.atomic))
      throw Fault("LDS race", "writes LDS that another wave read with no barrier between", lane, b);
    if (write) {
      m.write_phase = now;
      m.writer = u8(w.id);
      m.atomic = atomic;
      m.defined = 1;
    } else {
      if (m.read_phase != now) m.readers = 0;
      m.read_phase = now;
      m.readers |= me;
    }
  }
}

}  // namespace emu
