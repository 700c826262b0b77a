// SPDX-License-Identifier: MIT
// The machine: decoded instructions, waves, workgroups, memory. Everything that handlers may touch.
#pragma once
#include <array>
#include <atomic>
#include <cstdio>
#include <deque>
#include <memory>
#include <mutex>
#include <random>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

#include "formats.h"

namespace emu {

constexpr int kLanes = 64;
constexpr int kSgprs = 102;
constexpr u32 kLdsMax = 163840;
constexpr u64 kAllLanes = ~0ull;
constexpr u32 kPoison = 0x7fa5a5a5u;  // a signalling NaN: what nothing wrote, or not yet

// Operand codes: 0..255 as in the ISA's scalar source space, 256+n VGPR n, 512+n AccVGPR n.
enum Code : int {
  kVccLo = 106,
  kVccHi = 107,
  kM0 = 124,
  kExecLo = 126,
  kExecHi = 127,
  kSharedBase = 235,
  kSharedLimit = 236,
  kPrivateBase = 237,
  kPrivateLimit = 238,
  kVccz = 251,
  kExecz = 252,
  kScc = 253,
  kLiteral = 255,
  kVgpr = 256,
  kAgpr = 512,
};

// Aperture addresses: the high dword of src_shared_base and src_private_base.
constexpr u64 kSharedAperture = 0x0001000000000000ull;
constexpr u64 kPrivateAperture = 0x0002000000000000ull;

struct Wave;
struct Inst;
struct Deferred;
using Handler = void (*)(Wave&, const Inst&);

struct Operand {
  i32 code = -1;  // -1: absent
  i32 dwords = 0;
};

// One decoded instruction; the fields mirror FIELDS in decode.py.
struct Inst {
  Handler run = nullptr;
  u32 index = 0;  // position in the program
  i32 name = 0;   // mnemonic id
  u32 pc = 0;     // byte offset from the start of the code
  u32 size = 0;   // bytes
  i32 kind = 0;   // Kind
  Operand dst, sdst, src[3], data, addr, saddr, soffset;
  u32 literal = 0;
  u32 neg = 0, abs = 0, clamp = 0, omod = 0, opsel = 0, opsel_hi = 0;
  i32 dpp = -1;
  u32 bound_ctrl = 0, row_mask = 15, bank_mask = 15;
  u32 sdwa = 0, dst_sel = 6, dst_unused = 0, sel0 = 6, sel1 = 6, sext = 0;
  i32 offset = 0, offset1 = 0;
  u32 flags = 0;  // Flag
  u32 cbsz = 0, abid = 0, blgp = 0;
  i32 scale0 = -1, scale1 = -1;
  i32 simm = 0;
  i32 target = -1;        // branch target as program index
  bool modified = false;  // any of dpp, sdwa: operands take the slow path
  bool merges = false;    // a d16 load: keeps half of its destination
};

enum Kind : i32 {
  kBad,
  kSalu,
  kSopp,
  kSmem,
  kValu,
  kVop3p,
  kMfma,
  kDs,
  kGlobal,
  kFlat,
  kScratch,
  kMubuf
};
enum Flag : u32 {
  kSc0 = 1,
  kOffen = 2,
  kIdxen = 4,
  kLdsDma = 8,
  kGds = 16,
  kSve = 32,
  kLenient = 64,  // copies or selects: an unwritten source makes an unwritten result, not a fault
  kAllLanesUsed = 128,  // reads and writes all lanes whatever EXEC says
  kOwnCheck = 256,      // the handler checks its own sources
  kLowSum = 512,  // a 64-bit sum: the upper dword of src2 may be unwritten, and so is then that of
                  // the result
  kSumsIntoDst = 1024,  // src2 is the destination
  kNotIndexed = 2048,   // the manual has no rule for it under VGPR indexing
};

// Which wave executed which instruction; nothing when `wave` is -1.
struct Access {
  u32 index = 0;  // in the program
  i32 wave = -1;
};

// Thrown by handlers; the scheduler adds kernel, instruction, wave and workgroup.
struct Fault : std::runtime_error {
  std::string kind;
  int lane;
  u64 address;
  bool has_address;
  Access earlier;  // what the instruction collides with
  Fault(std::string k, const std::string& what, int l = -1)
      : std::runtime_error(what), kind(std::move(k)), lane(l), address(0), has_address(false) {}
  Fault(std::string k, const std::string& what, int l, u64 a)
      : std::runtime_error(what), kind(std::move(k)), lane(l), address(a), has_address(true) {}
};

// Fields of MODE that act on the emulator.
constexpr u32 kModeRound = 0xf, kModeDenorm32 = 4, kModeDenorm64 = 6;  // mask, shift, shift
constexpr u32 kModeGprIndex = 1u << 27;  // M0 moves the vector registers of VALU operands
constexpr u32 kModeVskip = 1u << 28;     // vector instructions are not issued

// Global memory: slots of 64 GiB, one host buffer each, so that a stray address meets a gap and not
// a neighbour.
struct Region {
  u8* host = nullptr;
  u64 size = 0;
  u64 write_lo = 0, write_hi = 0;  // writable part
  u8* defined = nullptr;           // one byte per byte; null: everything counts as written
  u8* read = nullptr;              // touched maps for the counts; null: not counted
  u8* written = nullptr;
  std::string label;
};

struct Memory {
  static constexpr u64 kBase = 1ull << 44;
  static constexpr int kSlotBits = 36;
  static constexpr u64 kLead = 1 << 20;  // gap before the first byte of a slot
  std::vector<Region> regions;
  // Host memory at its true address (the HIP runtime's place): first byte and region, ascending,
  // disjoint.
  std::vector<std::pair<u64, Region>> host_regions;

  static u64 address_of(size_t slot) { return kBase + (u64(slot) << kSlotBits) + kLead; }
  std::string describe(u64 address) const;
  [[noreturn]] void outside(u64 address, u32 size, int lane, const char* what) const;

  Region* find(u64 address, u32 size, u64* offset) {
    u64 slot = (address - kBase) >> kSlotBits;
    if (address < kBase || slot >= regions.size()) return find_host(address, size, offset);
    Region& r = regions[slot];
    u64 o = (address & ((1ull << kSlotBits) - 1)) - kLead;
    if (o >= r.size || size > r.size - o) return nullptr;
    *offset = o;
    return &r;
  }
  Region* find_host(u64 address, u32 size, u64* offset);
  const u8* load(u64 address, u32 size, int lane, bool check) {
    u64 o;
    Region* r = find(address, size, &o);
    if (!r) outside(address, size, lane, "read");
    if (check && r->defined)
      for (u32 i = 0; i < size; ++i)
        if (!r->defined[o + i])
          throw Fault("uninitialized memory",
                      "reads a byte that nothing wrote: " + describe(address + i), lane,
                      address + i);
    if (r->read) std::memset(r->read + o, 1, size);
    return r->host + o;
  }
  u8* store(u64 address, u32 size, int lane) {
    u64 o;
    Region* r = find(address, size, &o);
    if (!r || o < r->write_lo || o + size > r->write_hi) outside(address, size, lane, "write");
    if (r->defined) std::memset(r->defined + o, 1, size);
    if (r->written) std::memset(r->written + o, 1, size);
    return r->host + o;
  }
};

struct Stats {
  u64 lds_accesses = 0, lds_cycles = 0, lds_least_cycles = 0, lds_bytes = 0, lds_underaligned = 0;
  u64 vmem_accesses = 0, lines = 0, least_lines = 0, vmem_bytes = 0, atomics = 0;
  u64 waves = 0, barriers = 0, workgroups = 0;
  void add(const Stats& o) {
    lds_accesses += o.lds_accesses;
    lds_cycles += o.lds_cycles;
    lds_least_cycles += o.lds_least_cycles;
    lds_bytes += o.lds_bytes;
    lds_underaligned += o.lds_underaligned;
    vmem_accesses += o.vmem_accesses;
    lines += o.lines;
    least_lines += o.least_lines;
    vmem_bytes += o.vmem_bytes;
    atomics += o.atomics;
    waves += o.waves;
    barriers += o.barriers;
    workgroups += o.workgroups;
  }
};

// Who touched a byte of LDS, for the race check. `phase` counts the workgroup's barriers.
struct LdsMark {
  u32 write_phase = 0, read_phase = 0;  // phase + 1; 0: never
  u16 writers = 0, readers = 0;         // waves that wrote in write_phase, read in read_phase
  bool atomic = false;                  // the last write was one
  bool same = false;                    // all writes of the phase stored what was there
  bool defined = false;
  bool pending = false;  // an LDS-DMA load is on its way
};

// Beside the marks, because only reports look: the first access of a phase and the latest one by
// another wave than that.
struct LdsAccesses {
  struct Packed {
    u32 index : 28, wave : 4;
    Packed() : index(0), wave(0) {}
    Packed(const Access& a) : index(a.index & 0xfffffff), wave(u32(a.wave) & 15) {}
  };
  Packed first, other;
  Access by_another(int wave) const {
    const Packed& p = int(first.wave) != wave ? first : other;
    return {p.index, i32(p.wave)};
  }
};
struct LdsHistory {
  LdsAccesses writes, reads;
};

struct Program {
  std::vector<Inst> insts;
  std::vector<i32> at;  // pc/4 -> index, -1: no instruction starts there
  std::vector<std::string> names;
  std::string kernel;
  u64 code_address = 0;  // fake address of code offset 0
};

struct Launch {
  Program* program = nullptr;
  Memory* memory = nullptr;
  bool check = true, count = true;
  u32 lds_size = 0, scratch_size = 0;
  u32 arch_vgprs = 256, acc_vgprs = 256;
  u64 max_instructions = 0;
  enum Straddling { fault, outside, inside } straddling = fault;  // of a buffer's num_records
  bool unaligned = false;     // vector memory may be misaligned: SH_MEM_CONFIG's unaligned mode
  bool strict_races = false;  // stores of equal bytes are races, too
  enum Latency { early, late, random } latency = early;
  // Whether it is known which memory operations are under way.
  bool tracks() const { return check || latency != early; }
};

struct Workgroup {
  Launch* launch = nullptr;
  u32 id[3] = {0, 0, 0};
  std::vector<u8> lds;
  std::vector<LdsMark> marks;
  std::vector<LdsHistory> history;
  u32 phase = 0;
  Stats stats;
  // Vector memory operations in the order of issue (latency.cpp).
  std::deque<std::pair<Wave*, std::shared_ptr<Deferred>>> issued;
};

using Range = std::pair<u32, u32>;  // LDS bytes: begin, end

// An outstanding memory operation, for the wait check.
struct Outstanding {
  bool smem = false, scalar = false;
  u32 index = 0;                       // of the instruction
  int reg = -1, count = 0;             // registers that it will write
  std::vector<Range> dma;              // that a DMA load will write
  std::vector<Range> lds_writes;       // of a DS write that is under way
  std::shared_ptr<Deferred> deferred;  // null: it has taken effect
};

// A memory operation that has been issued and takes effect later, with what it reads (latency.cpp).
struct Deferred {
  using Row = std::array<u32, kLanes>;
  const Inst* inst = nullptr;
  u64 exec = 0;
  int queues = 1;  // that it is still in; a flat operation counts in both
  bool landed = false;
  std::vector<std::pair<int, u32>> scalars;  // sources, by operand code
  std::vector<std::pair<int, Row>> vectors;
  std::vector<Row> result;  // of one that landed before a wait let the wave see it
  std::vector<Range> dma, lds_writes;
};

struct Wave {
  u32 s[128] = {};
  u32 (*v)[kLanes] = nullptr;  // 512 rows: VGPRs, then AccVGPRs
  bool scc = false;
  u32 mode = 0;
  bool flush_sources = false, flush_results = false;  // MODE.FP_DENORM of float32
  u32 pc = 0;                                         // index of the next instruction
  int id = 0;
  Workgroup* wg = nullptr;
  enum Status { ready, barrier, done } status = ready;
  u64 live = kAllLanes;

  // Lane-wise EXEC as 0/~0 words, refreshed on demand.
  u64 mask_of = 0;
  alignas(64) u32 mask[kLanes] = {};
  u64 dpp_valid = kAllLanes;

  std::vector<u8> scratch;  // [lane][scratch_size]
  std::vector<u8> scratch_defined;
  u64 executed = 0;

  // Check state: which lanes of a register hold a written value; what is still on its way.
  std::array<u64, 512> defined{};
  std::array<u64, 2> sdefined{};
  std::array<u8, 512> vm_pending{}, lgkm_pending{};  // loads under way into a VGPR
  std::array<u8, 128> s_pending{};
  std::vector<Outstanding> vm_queue, lgkm_queue;
  Deferred* landing = nullptr;  // the deferred operation that takes effect now
  std::minstd_rand random;      // when the next one does

  // The program index of the instruction that executes.
  u32 current() const { return landing ? landing->inst->index : pc ? pc - 1 : 0; }
  u64 exec() const { return s[kExecLo] | (u64(s[kExecHi]) << 32); }
  u64 vcc() const { return s[kVccLo] | (u64(s[kVccHi]) << 32); }
  void set_pair(int code, u64 x) {
    s[code] = u32(x);
    s[code + 1] = u32(x >> 32);
  }
  u64 pair(int code) const { return s[code] | (u64(s[code + 1]) << 32); }
  Launch& launch() const { return *wg->launch; }
  bool check() const { return wg->launch->check; }

  const u32* exec_mask(u64 lanes) {
    if (lanes != mask_of) {
      for (int i = 0; i < kLanes; ++i) mask[i] = (lanes >> i) & 1 ? ~0u : 0u;
      mask_of = lanes;
    }
    return mask;
  }
  u32* vgpr(int code) { return v[code - kVgpr]; }
  void set_mode(u32 value) {
    if (value & kModeRound) throw Fault("unimplemented", "MODE.round other than nearest even");
    if (((value >> kModeDenorm64) & 3) != 3)
      throw Fault("unimplemented", "MODE.denorm that flushes float16 and float64");
    u32 denorm = value >> kModeDenorm32;
    flush_sources = !(denorm & 1), flush_results = !(denorm & 2);
    mode = value;
  }
};

// Handlers register themselves by mnemonic.
std::unordered_map<std::string, Handler>& handlers();
struct Register {
  Register(const char* name, Handler h) {
    if (!handlers().emplace(name, h).second)
      throw std::logic_error(std::string("handler twice: ") + name);
  }
};
#define EMU_CAT2(a, b) a##b
#define EMU_CAT(a, b) EMU_CAT2(a, b)
#define EMU_HANDLER(name, ...) \
  static const ::emu::Register EMU_CAT(reg_, __COUNTER__)(name, __VA_ARGS__);

// Whether a unit of a buffer access that begins before num_records and ends behind it is in range;
// throws unless the launch says.
bool straddles(Wave& w, u64 offset, u32 bytes, u64 records, int lane);
inline bool scalar_in_range(Wave& w, i64 offset, u32 bytes, i64 records) {
  if (offset >= 0 && offset < records && offset + i64(bytes) > records)
    return straddles(w, u64(offset), bytes, u64(records), -1);
  return offset + i64(bytes) <= records;
}

// Scalar operands.
u32 scalar32(Wave& w, const Inst& in, int code);
u64 scalar64(Wave& w, const Inst& in, int code, bool is_float);
inline float inline_float(int code) {
  constexpr float table[] = {0.5f, -0.5f, 1.f, -1.f, 2.f, -2.f, 4.f, -4.f, 0.15915494309189532f};
  return table[code - 240];
}

// check.cpp: are the registers that an instruction reads written, and arrived? Only with checks on.
void before(Wave& w, const Inst& in);
void after(Wave& w, const Inst& in);           // its destinations are written now
void read_scalar(Wave& w, const Operand& o);   // the same for scalar registers that a handler
void write_scalar(Wave& w, const Operand& o);  // finds itself
void passed_barrier(Wave& w);
void lds_read(Wave& w, u32 begin, u32 size, int lane);
// `value`: the bytes that a store writes; null when they depend on what is there.
void lds_write(Wave& w, u32 begin, u32 size, int lane, bool atomic, const u8* value);
void lds_filling(Wave& w, u32 begin, u32 size);  // by an LDS-DMA load that is on its way

// check.cpp: what is under way (Launch::tracks).
void issued(Wave& w, bool vm, bool lgkm, Outstanding op);
void waited(Wave& w, u32 vm, u32 lgkm);

// latency.cpp: memory operations that take effect later than they are issued.
bool defers(const Inst& in);
void defer(Wave& w, const Inst& in);
void release(Wave& w, Outstanding& op, bool vm);  // a wait has let it out of its queue
void land_some(Wave& w);  // maybe: an operation takes effect before a wait asks for it

}  // namespace emu
