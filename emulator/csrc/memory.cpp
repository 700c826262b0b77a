// SPDX-License-Identifier: MIT
// Vector memory: global, flat, scratch and buffer accesses, LDS-DMA loads, LDS (DS) instructions,
// atomics.
#include <algorithm>

#include "lanes.h"

namespace emu {

namespace {

// The last host region that begins at or below the address; end() when there is none.
template <class Regions>
auto host_region_below(Regions& regions, u64 address) {
  auto it = std::upper_bound(regions.begin(), regions.end(), address,
                             [](u64 a, const auto& r) { return a < r.first; });
  return it == regions.begin() ? regions.end() : std::prev(it);
}

}  // namespace

Region* Memory::find_host(u64 address, u32 size, u64* offset) {
  auto it = host_region_below(host_regions, address);
  if (it == host_regions.end()) return nullptr;
  u64 o = address - it->first;
  if (o >= it->second.size || size > it->second.size - o) return nullptr;
  *offset = o;
  return &it->second;
}

std::string Memory::describe(u64 address) const {
  char text[160];
  constexpr u64 kNear = 1 << 20;
  if (auto it = host_region_below(host_regions, address);
      it != host_regions.end() && address - it->first < it->second.size + kNear) {
    std::snprintf(text, sizeof text, "0x%llx (%s, byte %llu of %llu)",
                  static_cast<unsigned long long>(address), it->second.label.c_str(),
                  static_cast<unsigned long long>(address - it->first),
                  static_cast<unsigned long long>(it->second.size));
    return text;
  }
  u64 slot = (address - kBase) >> kSlotBits;
  if (address < kBase || slot >= regions.size()) {
    std::snprintf(text, sizeof text, "0x%llx (in no buffer)",
                  static_cast<unsigned long long>(address));
    return text;
  }
  const Region& r = regions[slot];
  long long o =
      static_cast<long long>(address & ((1ull << kSlotBits) - 1)) - static_cast<long long>(kLead);
  std::snprintf(text, sizeof text, "0x%llx (%s, byte %lld of %llu)",
                static_cast<unsigned long long>(address), r.label.c_str(), o,
                static_cast<unsigned long long>(r.size));
  return text;
}
void Memory::outside(u64 address, u32 size, int lane, const char* what) const {
  throw Fault("out of buffer",
              std::string(what) + "s " + std::to_string(size) +
                  " bytes outside every buffer it may " + what + " at " + describe(address),
              lane, address);
}

bool straddles(Wave& w, u64 offset, u32 bytes, u64 records, int lane) {
  if (w.launch().straddling == Launch::fault)
    throw Fault("straddles num_records",
                "accesses " + std::to_string(bytes) + " bytes at offset " + std::to_string(offset) +
                    " of a buffer with num_records " + std::to_string(records) +
                    "; whether that is in range is not settled (run's argument straddling)",
                lane);
  return w.launch().straddling == Launch::inside;
}

namespace {

constexpr Type U = Type::u32;

struct Shape {
  u32 bytes;  // per lane
  bool sext;  // sign extend bytes and shorts
  int d16;    // 0: whole dword, 1: low half, 2: high half
};
struct Addresses {
  u64 at[kLanes];
  u64 lanes;    // active and in range
  u64 dropped;  // active, out of range of a buffer resource: reads 0, writes nothing
};

void need_aligned(u64 address, u32 bytes, int lane, const char* space) {
  u32 unit = bytes >= 4 ? 4 : bytes;
  if (address % unit)
    throw Fault("misaligned access",
                std::string(space) + " access of " + std::to_string(bytes) + " bytes", lane,
                address);
}

// Distinct 128-byte lines of one access against the fewest that its bytes could fill.
void count_lines(Wave& w, const Addresses& a, u32 bytes) {
  u64 lines[2 * kLanes];
  int n = 0, active = 0;
  for (int l = 0; l < kLanes; ++l) {
    if (!((a.lanes >> l) & 1)) continue;
    ++active;
    lines[n++] = a.at[l] >> 7;
    u64 last = (a.at[l] + bytes - 1) >> 7;
    if (last != lines[n - 1]) lines[n++] = last;
  }
  if (!active) return;
  std::sort(lines, lines + n);
  u64 distinct[kLanes];
  int m = 0;
  for (int l = 0; l < kLanes; ++l)
    if ((a.lanes >> l) & 1) distinct[m++] = a.at[l];
  std::sort(distinct, distinct + m);
  u64 unique = u64(std::unique(distinct, distinct + m) - distinct) * bytes;
  Stats& s = w.wg->stats;
  s.lines += u64(std::unique(lines, lines + n) - lines);
  s.least_lines += (unique + 127) / 128;
  s.vmem_accesses++;
  s.vmem_bytes += u64(active) * bytes;
}

u32 extend(const u8* p, const Shape& s) {
  if (s.bytes == 1) return s.sext ? u32(i32(i8(*p))) : *p;
  u16 h;
  std::memcpy(&h, p, 2);
  return s.sext ? u32(i32(i16(h))) : h;
}
void put_small(u32* d, u32 value, const Shape& s) {
  if (s.d16 == 0) *d = value;
  if (s.d16 == 1) *d = (*d & 0xffff0000u) | (value & 0xffff);
  if (s.d16 == 2) *d = (*d & 0xffffu) | (value << 16);
}
void put(Wave& w, int code, int lane, const u8* p, const Shape& s) {
  if (s.bytes >= 4) {
    for (u32 i = 0; i < s.bytes / 4; ++i) std::memcpy(&w.vgpr(code + int(i))[lane], p + 4 * i, 4);
  } else {
    put_small(&w.vgpr(code)[lane], extend(p, s), s);
  }
}
void get(Wave& w, int code, int lane, u8* p, const Shape& s) {
  if (s.bytes >= 4) {
    for (u32 i = 0; i < s.bytes / 4 && i < 4; ++i)
      std::memcpy(p + 4 * i, &w.vgpr(code + int(i))[lane], 4);
  } else {
    u32 x = w.vgpr(code)[lane];
    if (s.d16 == 2) x >>= 16;
    std::memcpy(p, &x, s.bytes);
  }
}
int registers(const Shape& s) { return s.bytes >= 4 ? int(s.bytes / 4) : 1; }

// --- LDS bytes
// `value`: the bytes of a plain store.
u8* lds_at(Wave& w, u64 address, u32 bytes, int lane, bool write, bool atomic = false,
           const u8* value = nullptr) {
  auto& lds = w.wg->lds;
  if (address + bytes > lds.size()) {
    if (w.check())
      throw Fault("out of LDS",
                  "LDS access of " + std::to_string(bytes) + " bytes, " +
                      std::to_string(lds.size()) + " are allocated",
                  lane, address);
    return nullptr;
  }
  if (w.check()) {
    need_aligned(address, bytes, lane, "LDS");
    if (address % bytes && (bytes == 8 || bytes == 16)) w.wg->stats.lds_underaligned++;
    if (write)
      lds_write(w, u32(address), bytes, lane, atomic, value);
    else
      lds_read(w, u32(address), bytes, lane);
  }
  return lds.data() + address;
}

// --- scratch
u8* scratch_at(Wave& w, u64 offset, u32 bytes, int lane, bool write) {
  u32 size = w.launch().scratch_size;
  if (offset + bytes > size)
    throw Fault("out of scratch",
                "scratch access of " + std::to_string(bytes) + " bytes, " + std::to_string(size) +
                    " are allocated",
                lane, offset);
  u64 o = u64(lane) * size + offset;
  if (w.check()) {
    need_aligned(offset, bytes, lane, "scratch");
    if (write)
      std::memset(w.scratch_defined.data() + o, 1, bytes);
    else
      for (u32 i = 0; i < bytes; ++i)
        if (!w.scratch_defined[o + i])
          throw Fault("uninitialized memory", "reads scratch that nothing wrote", lane, offset + i);
  }
  return w.scratch.data() + o;
}

// --- addresses
void global_addresses(Wave& w, const Inst& in, Addresses& a) {
  a.lanes = w.exec();
  a.dropped = 0;
  const u32* lo = w.vgpr(in.addr.code);
  if (in.saddr.code >= 0) {
    u64 base = w.pair(in.saddr.code) + u64(i64(in.offset));
    for (int l = 0; l < kLanes; ++l) a.at[l] = base + lo[l];
  } else {
    const u32* hi = w.vgpr(in.addr.code + 1);
    for (int l = 0; l < kLanes; ++l) a.at[l] = (lo[l] | (u64(hi[l]) << 32)) + u64(i64(in.offset));
  }
}
void scratch_addresses(Wave& w, const Inst& in, Addresses& a) {
  a.lanes = w.exec();
  a.dropped = 0;
  u32 base = u32(in.offset) + (in.saddr.code >= 0 ? w.s[in.saddr.code] : 0);
  const u32* v = in.addr.code >= 0 ? w.vgpr(in.addr.code) : nullptr;
  for (int l = 0; l < kLanes; ++l) a.at[l] = u32(base + (v ? v[l] : 0));
}
// `unit`: what the range check looks at, a dword or a smaller element; one bit per unit is out of
// range alone.
struct Resource {
  u64 base;
  u32 records, stride;
  bool structured;
};
Resource resource(Wave& w, const Inst& in) {
  const u32* d = &w.s[in.saddr.code];
  Resource r;
  r.base = d[0] | (u64(d[1] & 0xffff) << 32);
  r.stride = (d[1] >> 16) & 0x3fff;
  r.records = d[2];
  bool swizzle = d[1] >> 31, add_tid = (d[3] >> 23) & 1;
  if (swizzle) throw Fault("unimplemented", "swizzled buffer resource");
  if (add_tid) throw Fault("unimplemented", "buffer resource with add_tid_enable");
  r.structured = (in.flags & kIdxen) && r.stride != 0;
  return r;
}
void buffer_addresses(Wave& w, const Inst& in, const Resource& r, Addresses& a, u64* offsets) {
  u64 exec = w.exec();
  u32 soffset = scalar32(w, in, in.soffset.code);
  const u32* v = in.addr.code >= 0 ? w.vgpr(in.addr.code) : nullptr;
  const u32* index = in.flags & kIdxen ? v : nullptr;
  const u32* voffset =
      in.flags & kOffen ? (in.flags & kIdxen ? w.vgpr(in.addr.code + 1) : v) : nullptr;
  a.lanes = exec;
  a.dropped = 0;
  for (int l = 0; l < kLanes; ++l) {
    u64 i = index ? index[l] : 0, o = u64(u32(in.offset)) + (voffset ? voffset[l] : 0);
    a.at[l] = r.base + soffset + o + r.stride * i;
    offsets[l] = r.structured ? (i < r.records ? 0 : ~0ull) : o + r.stride * i;
  }
}
bool in_range(const Resource& r, u64 offset, u32 bytes) {
  if (r.structured) return offset == 0;
  return offset + bytes <= r.records;
}
// The same for one unit, which lies in range, outside or across the end.
bool unit_in_range(Wave& w, const Resource& r, u64 offset, u32 unit, int lane) {
  if (!r.structured && offset < r.records && offset + unit > r.records)
    return straddles(w, offset, unit, r.records, lane);
  return in_range(r, offset, unit);
}

void finish_vm(Wave& w, int reg, int count, bool flat = false) {
  if (!w.check()) return;
  Outstanding op;
  op.reg = reg, op.count = count;
  issued(w, true, flat, op);
}

// --- loads and stores
enum class Space { global, flat, scratch, buffer };

bool in_lds(u64 address) { return (address >> 32) == (kSharedAperture >> 32); }
bool in_scratch(u64 address) { return (address >> 32) == (kPrivateAperture >> 32); }

const u8* read_place(Wave& w, Space space, u64 address, u32 bytes, int lane) {
  if (space == Space::scratch) return scratch_at(w, address, bytes, lane, false);
  if (space == Space::flat && in_scratch(address))
    return scratch_at(w, u32(address), bytes, lane, false);
  if (space == Space::flat && in_lds(address)) return lds_at(w, u32(address), bytes, lane, false);
  if (w.check() && !w.wg->launch->unaligned) need_aligned(address, bytes, lane, "global");
  return w.launch().memory->load(address, bytes, lane, w.check());
}
u8* write_place(Wave& w, Space space, u64 address, u32 bytes, int lane, const u8* value) {
  if (space == Space::scratch) return scratch_at(w, address, bytes, lane, true);
  if (space == Space::flat && in_scratch(address))
    return scratch_at(w, u32(address), bytes, lane, true);
  if (space == Space::flat && in_lds(address))
    return lds_at(w, u32(address), bytes, lane, true, false, value);
  if (w.check() && !w.wg->launch->unaligned) need_aligned(address, bytes, lane, "global");
  return w.launch().memory->store(address, bytes, lane);
}
void addresses(Wave& w, const Inst& in, Space space, Addresses& a) {
  if (space == Space::scratch)
    scratch_addresses(w, in, a);
  else
    global_addresses(w, in, a);
}

template <Space space>
void load(Wave& w, const Inst& in, Shape s) {
  static const u8 zeros[16] = {};
  Addresses a;
  if (space == Space::buffer) {
    u64 offsets[kLanes];
    Resource r = resource(w, in);
    buffer_addresses(w, in, r, a, offsets);
    u32 unit = s.bytes < 4 ? s.bytes : 4;
    u64 touched = 0;
    for (int l = 0; l < kLanes; ++l) {
      if (!((a.lanes >> l) & 1)) continue;
      u8 got[16];
      bool whole = r.structured ? in_range(r, offsets[l], 0) : in_range(r, offsets[l], s.bytes);
      if (whole) {
        std::memcpy(got, read_place(w, space, a.at[l], s.bytes, l), s.bytes);
        touched |= 1ull << l;
      } else {
        for (u32 o = 0; o < s.bytes; o += unit) {
          bool ok = !r.structured && unit_in_range(w, r, offsets[l] + o, unit, l);
          std::memcpy(got + o, ok ? read_place(w, space, a.at[l] + o, unit, l) : zeros, unit);
        }
      }
      put(w, in.dst.code, l, got, s);
    }
    a.lanes = touched;
  } else {
    addresses(w, in, space, a);
    for (int l = 0; l < kLanes; ++l)
      if ((a.lanes >> l) & 1) {
        const u8* p = read_place(w, space, a.at[l], s.bytes, l);
        put(w, in.dst.code, l, p ? p : zeros, s);
      }
  }
  if (w.launch().count && space != Space::scratch) count_lines(w, a, s.bytes);
  finish_vm(w, in.dst.code - kVgpr, registers(s), space == Space::flat);
}

template <Space space>
void store(Wave& w, const Inst& in, Shape s) {
  Addresses a;
  u8 bytes[16];
  if (space == Space::buffer) {
    u64 offsets[kLanes];
    Resource r = resource(w, in);
    buffer_addresses(w, in, r, a, offsets);
    u32 unit = s.bytes < 4 ? s.bytes : 4;
    u64 touched = 0;
    for (int l = 0; l < kLanes; ++l) {
      if (!((a.lanes >> l) & 1)) continue;
      get(w, in.data.code, l, bytes, s);
      if (r.structured ? in_range(r, offsets[l], 0) : in_range(r, offsets[l], s.bytes)) {
        std::memcpy(write_place(w, space, a.at[l], s.bytes, l, bytes), bytes, s.bytes);
        touched |= 1ull << l;
      } else if (!r.structured) {
        for (u32 o = 0; o < s.bytes; o += unit)
          if (unit_in_range(w, r, offsets[l] + o, unit, l))
            std::memcpy(write_place(w, space, a.at[l] + o, unit, l, bytes + o), bytes + o, unit);
      }
    }
    a.lanes = touched;
  } else {
    addresses(w, in, space, a);
    for (int l = 0; l < kLanes; ++l) {
      if (!((a.lanes >> l) & 1)) continue;
      get(w, in.data.code, l, bytes, s);
      if (u8* p = write_place(w, space, a.at[l], s.bytes, l, bytes)) std::memcpy(p, bytes, s.bytes);
    }
  }
  if (w.launch().count && space != Space::scratch) count_lines(w, a, s.bytes);
  finish_vm(w, -1, 0, space == Space::flat);
}

// --- LDS-DMA: LDS address = M0 + instruction offset + lane * bytes; the memory side adds the
// offset as well.
template <Space space>
void dma(Wave& w, const Inst& in, u32 bytes) {
  Addresses a;
  u64 offsets[kLanes];
  Resource r{};
  if (space == Space::buffer) {
    r = resource(w, in);
    buffer_addresses(w, in, r, a, offsets);
  } else {
    global_addresses(w, in, a);
  }
  if (w.check() && !(w.sdefined[1] >> (kM0 - 64) & 1))
    throw Fault("uninitialized register", "LDS-DMA with M0 never written");
  u32 base = (w.s[kM0] & 0x3ffff) + u32(in.offset);
  Outstanding op;
  for (int l = 0; l < kLanes; ++l) {
    if (!((a.lanes >> l) & 1)) continue;
    u32 to = base + u32(l) * bytes;
    u8 got[16] = {};
    for (u32 o = 0; o < bytes; o += 4) {  // ASSUMED: an out of range lane stores 0
      if (space == Space::buffer &&
          !unit_in_range(w, r, r.structured ? offsets[l] : offsets[l] + o, 4, l))
        continue;
      std::memcpy(got + o, read_place(w, Space::global, a.at[l] + o, 4, l), 4);
    }
    if (u8* p = lds_at(w, to, bytes, l, true, false, got)) {
      std::memcpy(p, got, bytes);
      if (w.check()) {
        lds_filling(w, to, bytes);
        op.dma.emplace_back(to, to + bytes);
      }
    }
  }
  if (w.launch().count) {
    count_lines(w, a, bytes);
    w.wg->stats.lds_bytes += u64(__builtin_popcountll(a.lanes)) * bytes;
  }
  if (w.check()) issued(w, true, false, op);
}

// --- atomics
std::mutex& lock_of(const void* p) {
  static std::mutex locks[64];
  return locks[(reinterpret_cast<std::uintptr_t>(p) >> 6) & 63];
}
inline u32 add_bf16(u32 a, u32 b) { return bf16_of(of_bf16(a & 0xffff) + of_bf16(b & 0xffff)); }
inline u32 add_f16(u32 a, u32 b) { return f16_of(of_f16(a & 0xffff) + of_f16(b & 0xffff)); }

struct Swap {
  template <class T>
  static T f(T, T x, T) {
    return x;
  }
};
struct CmpSwap {
  template <class T>
  static T f(T m, T x, T c) {
    return m == c ? x : m;
  }
};
struct Add {
  template <class T>
  static T f(T m, T x, T) {
    return m + x;
  }
};
struct Sub {
  template <class T>
  static T f(T m, T x, T) {
    return m - x;
  }
};
struct Rsub {
  template <class T>
  static T f(T m, T x, T) {
    return x - m;
  }
};
struct UMin {
  template <class T>
  static T f(T m, T x, T) {
    return x < m ? x : m;
  }
};
struct UMax {
  template <class T>
  static T f(T m, T x, T) {
    return x > m ? x : m;
  }
};
template <class T>
using Signed = typename std::make_signed<T>::type;
struct SMin {
  template <class T>
  static T f(T m, T x, T) {
    return Signed<T>(x) < Signed<T>(m) ? x : m;
  }
};
struct SMax {
  template <class T>
  static T f(T m, T x, T) {
    return Signed<T>(x) > Signed<T>(m) ? x : m;
  }
};
struct And {
  template <class T>
  static T f(T m, T x, T) {
    return m & x;
  }
};
struct Or {
  template <class T>
  static T f(T m, T x, T) {
    return m | x;
  }
};
struct Xor {
  template <class T>
  static T f(T m, T x, T) {
    return m ^ x;
  }
};
struct Inc {
  template <class T>
  static T f(T m, T x, T) {
    return m >= x ? 0 : m + 1;
  }
};
struct Dec {
  template <class T>
  static T f(T m, T x, T) {
    return m == 0 || m > x ? x : m - 1;
  }
};
// Global float32 adds flush denormals (in the L2), LDS ones keep them.
struct AddF32 {
  template <class T>
  static T f(T m, T x, T) {
    return T(flush(u32_of(f32_of(flush(u32(m))) + f32_of(flush(u32(x))))));
  }
};
struct AddF32Lds {
  template <class T>
  static T f(T m, T x, T) {
    return T(u32_of(f32_of(u32(m)) + f32_of(u32(x))));
  }
};
struct MaxF32 {
  template <class T>
  static T f(T m, T x, T) {
    return T(u32_of(std::fmax(f32_of(u32(m)), f32_of(u32(x)))));
  }
};
struct MinF32 {
  template <class T>
  static T f(T m, T x, T) {
    return T(u32_of(std::fmin(f32_of(u32(m)), f32_of(u32(x)))));
  }
};
struct PkAddBf16 {
  template <class T>
  static T f(T m, T x, T) {
    return T(add_bf16(u32(m), u32(x)) | (add_bf16(u32(m >> 16), u32(x >> 16)) << 16));
  }
};
struct PkAddF16 {
  template <class T>
  static T f(T m, T x, T) {
    return T(add_f16(u32(m), u32(x)) | (add_f16(u32(m >> 16), u32(x >> 16)) << 16));
  }
};
struct AddF64 {
  template <class T>
  static T f(T m, T x, T) {
    return T(bits<u64>(bits<double>(u64(m)) + bits<double>(u64(x))));
  }
};
struct MinF64 {
  template <class T>
  static T f(T m, T x, T) {
    return T(bits<u64>(std::fmin(bits<double>(u64(m)), bits<double>(u64(x)))));
  }
};
struct MaxF64 {
  template <class T>
  static T f(T m, T x, T) {
    return T(bits<u64>(std::fmax(bits<double>(u64(m)), bits<double>(u64(x)))));
  }
};

template <class T>
T operand(Wave& w, int code, int lane) {
  u64 x = w.vgpr(code)[lane];
  if (sizeof(T) == 8) x |= u64(w.vgpr(code + 1)[lane]) << 32;
  return T(x);
}
template <class T>
void result(Wave& w, int code, int lane, T value) {
  w.vgpr(code)[lane] = u32(value);
  if (sizeof(T) == 8) w.vgpr(code + 1)[lane] = u32(u64(value) >> 32);
}

template <Space space, class Op, class T>
void atomic(Wave& w, const Inst& in) {
  Addresses a;
  u64 offsets[kLanes];
  Resource r{};
  if (space == Space::buffer) {
    r = resource(w, in);
    buffer_addresses(w, in, r, a, offsets);
    for (int l = 0; l < kLanes; ++l)
      if (((a.lanes >> l) & 1) && !unit_in_range(w, r, offsets[l], sizeof(T), l))
        a.lanes &= ~(1ull << l);
  } else {
    addresses(w, in, space, a);
  }
  constexpr bool compare = std::is_same<Op, CmpSwap>::value;
  for (int l = 0; l < kLanes; ++l) {
    if (!((a.lanes >> l) & 1)) continue;
    if (space == Space::flat && in_scratch(a.at[l]))
      throw Fault("unimplemented", "atomic on scratch", l);
    T x = operand<T>(w, in.data.code, l);
    T c = compare ? operand<T>(w, in.data.code + int(sizeof(T) / 4), l) : T(0);
    if (w.check() && a.at[l] % sizeof(T)) throw Fault("misaligned access", "atomic", l, a.at[l]);
    if (space == Space::flat && in_lds(a.at[l]))
      throw Fault("unimplemented", "flat atomic on LDS", l);
    w.launch().memory->load(a.at[l], sizeof(T), l, w.check());
    u8* p = w.launch().memory->store(a.at[l], sizeof(T), l);
    T old;
    {
      std::lock_guard<std::mutex> hold(lock_of(p));
      std::memcpy(&old, p, sizeof(T));
      T fresh = Op::template f<T>(old, x, c);
      std::memcpy(p, &fresh, sizeof(T));
    }
    if (in.flags & kSc0) result<T>(w, in.dst.code, l, old);
  }
  if (w.launch().count) {
    count_lines(w, a, sizeof(T));
    w.wg->stats.atomics += u64(__builtin_popcountll(a.lanes));
  }
  bool returns = in.flags & kSc0;
  finish_vm(w, returns ? in.dst.code - kVgpr : -1, returns ? int(sizeof(T) / 4) : 0,
            space == Space::flat);
}

#define ALL_SPACES(suffix, G, ...)                                                                 \
  EMU_HANDLER("global_" suffix,                                                                    \
              [](Wave& w, const Inst& in) { G<Space::global>(w, in, __VA_ARGS__); })               \
  EMU_HANDLER("flat_" suffix, [](Wave& w, const Inst& in) { G<Space::flat>(w, in, __VA_ARGS__); }) \
  EMU_HANDLER("scratch_" suffix,                                                                   \
              [](Wave& w, const Inst& in) { G<Space::scratch>(w, in, __VA_ARGS__); })
#define BUFFER(suffix, G, ...)  \
  EMU_HANDLER("buffer_" suffix, \
              [](Wave& w, const Inst& in) { G<Space::buffer>(w, in, __VA_ARGS__); })
#define LOADS(suffix, ...) ALL_SPACES(suffix, load, __VA_ARGS__)
LOADS("load_ubyte", Shape{1, false, 0})
LOADS("load_sbyte", Shape{1, true, 0})
LOADS("load_ushort", Shape{2, false, 0})
LOADS("load_sshort", Shape{2, true, 0})
LOADS("load_dword", Shape{4, false, 0})
LOADS("load_dwordx2", Shape{8, false, 0})
LOADS("load_dwordx3", Shape{12, false, 0})
LOADS("load_dwordx4", Shape{16, false, 0})
LOADS("load_ubyte_d16", Shape{1, false, 1})
LOADS("load_ubyte_d16_hi", Shape{1, false, 2})
LOADS("load_sbyte_d16", Shape{1, true, 1})
LOADS("load_sbyte_d16_hi", Shape{1, true, 2})
LOADS("load_short_d16", Shape{2, false, 1})
LOADS("load_short_d16_hi", Shape{2, false, 2})
ALL_SPACES("store_byte", store, Shape{1, false, 0})
ALL_SPACES("store_byte_d16_hi", store, Shape{1, false, 2})
ALL_SPACES("store_short", store, Shape{2, false, 0})
ALL_SPACES("store_short_d16_hi", store, Shape{2, false, 2})
ALL_SPACES("store_dword", store, Shape{4, false, 0})
ALL_SPACES("store_dwordx2", store, Shape{8, false, 0})
ALL_SPACES("store_dwordx3", store, Shape{12, false, 0})
ALL_SPACES("store_dwordx4", store, Shape{16, false, 0})

void buffer_load(Wave& w, const Inst& in, Shape s) {
  if (!(in.flags & kLdsDma)) return load<Space::buffer>(w, in, s);
  if (s.bytes < 4) throw Fault("unimplemented", "LDS-DMA of bytes or shorts");
  dma<Space::buffer>(w, in, s.bytes);
}
#define BUFFER_LOAD(suffix, ...)     \
  EMU_HANDLER("buffer_load_" suffix, \
              [](Wave& w, const Inst& in) { buffer_load(w, in, __VA_ARGS__); })
BUFFER_LOAD("ubyte", Shape{1, false, 0})
BUFFER_LOAD("sbyte", Shape{1, true, 0})
BUFFER_LOAD("ushort", Shape{2, false, 0})
BUFFER_LOAD("sshort", Shape{2, true, 0})
BUFFER_LOAD("dword", Shape{4, false, 0})
BUFFER_LOAD("dwordx2", Shape{8, false, 0})
BUFFER_LOAD("dwordx3", Shape{12, false, 0})
BUFFER_LOAD("dwordx4", Shape{16, false, 0})
BUFFER_LOAD("ubyte_d16", Shape{1, false, 1})
BUFFER_LOAD("ubyte_d16_hi", Shape{1, false, 2})
BUFFER_LOAD("sbyte_d16", Shape{1, true, 1})
BUFFER_LOAD("sbyte_d16_hi", Shape{1, true, 2})
BUFFER_LOAD("short_d16", Shape{2, false, 1})
BUFFER_LOAD("short_d16_hi", Shape{2, false, 2})
BUFFER("store_byte", store, Shape{1, false, 0})
BUFFER("store_byte_d16_hi", store, Shape{1, false, 2})
BUFFER("store_short", store, Shape{2, false, 0})
BUFFER("store_short_d16_hi", store, Shape{2, false, 2})
BUFFER("store_dword", store, Shape{4, false, 0})
BUFFER("store_dwordx2", store, Shape{8, false, 0})
BUFFER("store_dwordx3", store, Shape{12, false, 0})
BUFFER("store_dwordx4", store, Shape{16, false, 0})
EMU_HANDLER("global_load_lds_dword", [](Wave& w, const Inst& in) { dma<Space::global>(w, in, 4); })
EMU_HANDLER("global_load_lds_dwordx3",
            [](Wave& w, const Inst& in) { dma<Space::global>(w, in, 12); })
EMU_HANDLER("global_load_lds_dwordx4",
            [](Wave& w, const Inst& in) { dma<Space::global>(w, in, 16); })
// Cache maintenance has nothing to do here, but counts like a memory operation.
EMU_HANDLER("buffer_wbl2", [](Wave& w, const Inst&) { finish_vm(w, -1, 0); })
EMU_HANDLER("buffer_inv", [](Wave& w, const Inst&) { finish_vm(w, -1, 0); })
EMU_HANDLER("buffer_wbinvl1", [](Wave& w, const Inst&) { finish_vm(w, -1, 0); })
EMU_HANDLER("buffer_wbinvl1_vol", [](Wave& w, const Inst&) { finish_vm(w, -1, 0); })

#define ATOMIC(suffix, Op, T)                                          \
  EMU_HANDLER("global_atomic_" suffix, (atomic<Space::global, Op, T>)) \
  EMU_HANDLER("flat_atomic_" suffix, (atomic<Space::flat, Op, T>))     \
  EMU_HANDLER("buffer_atomic_" suffix, (atomic<Space::buffer, Op, T>))
#define ATOMIC_BOTH(suffix, Op) ATOMIC(suffix, Op, u32) ATOMIC(suffix "_x2", Op, u64)
ATOMIC_BOTH("swap", Swap)
ATOMIC_BOTH("cmpswap", CmpSwap)
ATOMIC_BOTH("add", Add)
ATOMIC_BOTH("sub", Sub)
ATOMIC_BOTH("smin", SMin)
ATOMIC_BOTH("umin", UMin)
ATOMIC_BOTH("smax", SMax)
ATOMIC_BOTH("umax", UMax)
ATOMIC_BOTH("and", And)
ATOMIC_BOTH("or", Or)
ATOMIC_BOTH("xor", Xor)
ATOMIC_BOTH("inc", Inc)
ATOMIC_BOTH("dec", Dec)
ATOMIC("add_f32", AddF32, u32)
ATOMIC("pk_add_f16", PkAddF16, u32)
ATOMIC("pk_add_bf16", PkAddBf16, u32)
ATOMIC("add_f64", AddF64, u64)
ATOMIC("min_f64", MinF64, u64)
ATOMIC("max_f64", MaxF64, u64)

// --- DS
// Conflict cycles: in each phase the busiest of the 64 banks; lanes that share a dword count once.
void count_banks(Wave& w, const u64* at, u64 lanes, u32 bytes) {
  if (!lanes) return;
  Stats& s = w.wg->stats;
  static const u64 phases128[4] = {0x000000000ff0f00full, 0x0ff0f00f00000000ull,
                                   0x00000000f00f0ff0ull, 0xf00f0ff000000000ull};
  u64 phase[4];
  int n;
  if (bytes <= 4)
    n = 1, phase[0] = kAllLanes;
  else if (bytes == 8)
    n = 2, phase[0] = 0xffffffffull, phase[1] = ~0xffffffffull;
  else
    n = 4, std::copy(phases128, phases128 + 4, phase);
  for (int p = 0; p < n; ++p) {
    u64 in_phase = lanes & phase[p];
    if (!in_phase) continue;
    u32 words[kLanes * 4];
    int m = 0;
    for (int l = 0; l < kLanes; ++l)
      if ((in_phase >> l) & 1)
        for (u32 o = 0; o < (bytes < 4 ? 4 : bytes); o += 4) words[m++] = u32((at[l] + o) / 4);
    std::sort(words, words + m);
    m = int(std::unique(words, words + m) - words);
    int bank[64] = {}, worst = 0;
    for (int i = 0; i < m; ++i) worst = std::max(worst, ++bank[words[i] & 63]);
    s.lds_cycles += u64(worst);
    s.lds_least_cycles += 1;
  }
  s.lds_accesses++;
  s.lds_bytes += u64(__builtin_popcountll(lanes)) * bytes;
}
void finish_lds(Wave& w, int reg, int count, std::vector<std::pair<u32, u32>> writes = {}) {
  if (!w.check()) return;
  Outstanding op;
  op.reg = reg, op.count = count;
  op.lds_writes = std::move(writes);
  issued(w, false, true, op);
}
void no_gds(const Inst& in) {
  if (in.flags & kGds) throw Fault("unimplemented", "GDS");
}
u32 ds_offset(const Inst& in) { return u32(in.offset) | (u32(in.offset1) << 8); }

void ds_addresses(Wave& w, const Inst& in, u32 offset, u64* at) {
  const u32* a = w.vgpr(in.addr.code);
  for (int l = 0; l < kLanes; ++l) at[l] = u32(a[l] + offset);  // wraps at 32 bits
}
void ds_read_at(Wave& w, int to, u64* at, Shape s) {
  static const u8 zeros[16] = {};
  u64 exec = w.exec();
  for (int l = 0; l < kLanes; ++l)
    if ((exec >> l) & 1) {
      const u8* p = lds_at(w, at[l], s.bytes, l, false);
      put(w, to, l, p ? p : zeros, s);
    }
  if (w.launch().count) count_banks(w, at, exec, s.bytes);
}
void ds_write_at(Wave& w, int from, u64* at, Shape s, std::vector<std::pair<u32, u32>>& writes) {
  u64 exec = w.exec();
  u8 bytes[16];
  for (int l = 0; l < kLanes; ++l)
    if ((exec >> l) & 1) {
      get(w, from, l, bytes, s);
      if (u8* p = lds_at(w, at[l], s.bytes, l, true, false, bytes)) std::memcpy(p, bytes, s.bytes);
      if (w.check()) writes.emplace_back(u32(at[l]), u32(at[l]) + s.bytes);
    }
  if (w.launch().count) count_banks(w, at, exec, s.bytes);
}
void ds_read(Wave& w, const Inst& in, Shape s) {
  no_gds(in);
  u64 at[kLanes];
  ds_addresses(w, in, ds_offset(in), at);
  ds_read_at(w, in.dst.code, at, s);
  finish_lds(w, in.dst.code - kVgpr, registers(s));
}
void ds_write(Wave& w, const Inst& in, Shape s) {
  no_gds(in);
  u64 at[kLanes];
  std::vector<std::pair<u32, u32>> writes;
  ds_addresses(w, in, ds_offset(in), at);
  ds_write_at(w, in.data.code, at, s, writes);
  finish_lds(w, -1, 0, std::move(writes));
}
void ds_read2(Wave& w, const Inst& in, u32 bytes, u32 stride) {
  no_gds(in);
  u64 at[kLanes];
  // The address register may be part of the destination: both address sets come first.
  u64 second[kLanes];
  ds_addresses(w, in, u32(in.offset) * stride, at);
  ds_addresses(w, in, u32(in.offset1) * stride, second);
  ds_read_at(w, in.dst.code, at, Shape{bytes, false, 0});
  ds_read_at(w, in.dst.code + int(bytes / 4), second, Shape{bytes, false, 0});
  finish_lds(w, in.dst.code - kVgpr, int(bytes / 2));
}
void ds_write2(Wave& w, const Inst& in, u32 bytes, u32 stride) {
  no_gds(in);
  u64 at[kLanes];
  std::vector<std::pair<u32, u32>> writes;
  ds_addresses(w, in, u32(in.offset) * stride, at);
  ds_write_at(w, in.data.code, at, Shape{bytes, false, 0}, writes);
  ds_addresses(w, in, u32(in.offset1) * stride, at);
  ds_write_at(w, in.src[0].code, at, Shape{bytes, false, 0}, writes);
  finish_lds(w, -1, 0, std::move(writes));
}
#define DS_READ(name, ...) \
  EMU_HANDLER(name, [](Wave& w, const Inst& in) { ds_read(w, in, __VA_ARGS__); })
#define DS_WRITE(name, ...) \
  EMU_HANDLER(name, [](Wave& w, const Inst& in) { ds_write(w, in, __VA_ARGS__); })
DS_READ("ds_read_u8", Shape{1, false, 0})
DS_READ("ds_read_i8", Shape{1, true, 0})
DS_READ("ds_read_u16", Shape{2, false, 0})
DS_READ("ds_read_i16", Shape{2, true, 0})
DS_READ("ds_read_u8_d16", Shape{1, false, 1})
DS_READ("ds_read_u8_d16_hi", Shape{1, false, 2})
DS_READ("ds_read_i8_d16", Shape{1, true, 1})
DS_READ("ds_read_i8_d16_hi", Shape{1, true, 2})
DS_READ("ds_read_u16_d16", Shape{2, false, 1})
DS_READ("ds_read_u16_d16_hi", Shape{2, false, 2})
DS_READ("ds_read_b32", Shape{4, false, 0})
DS_READ("ds_read_b64", Shape{8, false, 0})
DS_READ("ds_read_b96", Shape{12, false, 0})
DS_READ("ds_read_b128", Shape{16, false, 0})
DS_WRITE("ds_write_b8", Shape{1, false, 0})
DS_WRITE("ds_write_b8_d16_hi", Shape{1, false, 2})
DS_WRITE("ds_write_b16", Shape{2, false, 0})
DS_WRITE("ds_write_b16_d16_hi", Shape{2, false, 2})
DS_WRITE("ds_write_b32", Shape{4, false, 0})
DS_WRITE("ds_write_b64", Shape{8, false, 0})
DS_WRITE("ds_write_b96", Shape{12, false, 0})
DS_WRITE("ds_write_b128", Shape{16, false, 0})
EMU_HANDLER("ds_read2_b32", [](Wave& w, const Inst& in) { ds_read2(w, in, 4, 4); })
EMU_HANDLER("ds_read2st64_b32", [](Wave& w, const Inst& in) { ds_read2(w, in, 4, 256); })
EMU_HANDLER("ds_read2_b64", [](Wave& w, const Inst& in) { ds_read2(w, in, 8, 8); })
EMU_HANDLER("ds_read2st64_b64", [](Wave& w, const Inst& in) { ds_read2(w, in, 8, 512); })
EMU_HANDLER("ds_write2_b32", [](Wave& w, const Inst& in) { ds_write2(w, in, 4, 4); })
EMU_HANDLER("ds_write2st64_b32", [](Wave& w, const Inst& in) { ds_write2(w, in, 4, 256); })
EMU_HANDLER("ds_write2_b64", [](Wave& w, const Inst& in) { ds_write2(w, in, 8, 8); })
EMU_HANDLER("ds_write2st64_b64", [](Wave& w, const Inst& in) { ds_write2(w, in, 8, 512); })
EMU_HANDLER("ds_nop", [](Wave& w, const Inst&) { finish_lds(w, -1, 0); })

// Transpose reads: lane l of each group of 16 gets element (l%16)%E of lanes P*n + (l%16)/E, n =
// 0..E-1.
void ds_read_tr(Wave& w, const Inst& in, int element_bits, u32 bytes) {
  no_gds(in);
  if (w.check() && w.exec() != kAllLanes)
    throw Fault("partial EXEC", "transpose reads need every lane active");
  u64 at[kLanes];
  ds_addresses(w, in, ds_offset(in), at);
  u8 fetched[kLanes][12] = {};
  for (int l = 0; l < kLanes; ++l)
    if (const u8* p = lds_at(w, at[l], bytes, l, false)) std::memcpy(fetched[l], p, bytes);
  int E = element_bits == 6 ? 16 : 64 / element_bits, P = 16 / E;
  auto element = [&](int lane, int e) {
    u32 x = 0;
    for (int b = 0; b < element_bits; ++b) {
      int bit = e * element_bits + b;
      x |= u32((fetched[lane][bit / 8] >> (bit % 8)) & 1) << b;
    }
    return x;
  };
  u64 exec = w.exec();
  for (int l = 0; l < kLanes; ++l) {
    u32 out[3] = {};
    for (int n = 0; n < E; ++n) {
      u32 x = element((l & ~15) + P * n + (l % 16) / E, (l % 16) % E);
      for (int b = 0; b < element_bits; ++b) {
        int bit = n * element_bits + b;
        out[bit / 32] |= ((x >> b) & 1) << (bit % 32);
      }
    }
    if ((exec >> l) & 1)
      for (u32 i = 0; i < bytes / 4; ++i) w.vgpr(in.dst.code + int(i))[l] = out[i];
  }
  if (w.launch().count) count_banks(w, at, exec, bytes);
  finish_lds(w, in.dst.code - kVgpr, int(bytes / 4));
}
EMU_HANDLER("ds_read_b64_tr_b16", [](Wave& w, const Inst& in) { ds_read_tr(w, in, 16, 8); })
EMU_HANDLER("ds_read_b64_tr_b8", [](Wave& w, const Inst& in) { ds_read_tr(w, in, 8, 8); })
EMU_HANDLER("ds_read_b64_tr_b4", [](Wave& w, const Inst& in) { ds_read_tr(w, in, 4, 8); })
EMU_HANDLER("ds_read_b96_tr_b6", [](Wave& w, const Inst& in) { ds_read_tr(w, in, 6, 12); })

// Lane permutes touch no LDS memory.
EMU_HANDLER("ds_bpermute_b32", [](Wave& w, const Inst& in) {
  const u32 *a = w.vgpr(in.addr.code), *d = w.vgpr(in.data.code);
  u64 exec = w.exec();
  Lanes out;
  for (int l = 0; l < kLanes; ++l) {
    int from = int(((a[l] + ds_offset(in)) / 4) % 64);
    out.x[l] = (exec >> from) & 1 ? d[from] : 0;
  }
  store_masked(w, w.vgpr(in.dst.code), out.x, exec);
  finish_lds(w, in.dst.code - kVgpr, 1);
})
EMU_HANDLER("ds_permute_b32", [](Wave& w, const Inst& in) {
  const u32 *a = w.vgpr(in.addr.code), *d = w.vgpr(in.data.code);
  u64 exec = w.exec();
  Lanes out = {};
  for (int l = 0; l < kLanes; ++l)
    if ((exec >> l) & 1) out.x[((a[l] + ds_offset(in)) / 4) % 64] = d[l];
  store_masked(w, w.vgpr(in.dst.code), out.x, exec);
  finish_lds(w, in.dst.code - kVgpr, 1);
})
// The operand is the ADDR register; the pattern is in the offset field.
EMU_HANDLER("ds_swizzle_b32", [](Wave& w, const Inst& in) {
  const u32* d = w.vgpr(in.addr.code);
  u32 o = ds_offset(in);
  u64 exec = w.exec();
  Lanes out;
  if (o >= 0xc000) throw Fault("unimplemented", "ds_swizzle FFT and rotate modes");
  for (int l = 0; l < kLanes; ++l) {
    int from;
    if (o & 0x8000)
      from = (l & ~3) | int((o >> (2 * (l & 3))) & 3);
    else
      from = (l & 32) | ((((l & 31) & int(o & 31)) | int((o >> 5) & 31)) ^ int((o >> 10) & 31));
    out.x[l] = (exec >> from) & 1 ? d[from] : 0;
  }
  store_masked(w, w.vgpr(in.dst.code), out.x, exec);
  finish_lds(w, in.dst.code - kVgpr, 1);
})

template <class Op, class T>
T ds_result(const Wave& w, T old, T x, T c) {
  if constexpr (std::is_same<Op, AddF32Lds>::value) {  // the one LDS atomic that obeys MODE.denorm
    if (w.flush_sources) old = flush(old), x = flush(x);
    T sum = Op::template f<T>(old, x, c);
    return w.flush_results ? flush(sum) : sum;
  }
  return Op::template f<T>(old, x, c);
}
template <class Op, class T, bool Returns>
void ds_atomic(Wave& w, const Inst& in) {
  no_gds(in);
  u64 at[kLanes], exec = w.exec();
  ds_addresses(w, in, ds_offset(in), at);
  constexpr bool compare = std::is_same<Op, CmpSwap>::value;
  for (int l = 0; l < kLanes; ++l) {
    if (!((exec >> l) & 1)) continue;
    // DS compare and swap takes the comparand first.
    T x = operand<T>(w, compare ? in.src[0].code : in.data.code, l),
      c = operand<T>(w, in.data.code, l), old = 0;
    if (u8* p = lds_at(w, at[l], sizeof(T), l, true, true)) {
      std::memcpy(&old, p, sizeof(T));
      T fresh = ds_result<Op, T>(w, old, x, c);
      std::memcpy(p, &fresh, sizeof(T));
    }
    if (Returns) result<T>(w, in.dst.code, l, old);
  }
  if (w.launch().count) {
    count_banks(w, at, exec, sizeof(T));
    w.wg->stats.atomics += u64(__builtin_popcountll(exec));
  }
  finish_lds(w, Returns ? in.dst.code - kVgpr : -1, Returns ? int(sizeof(T) / 4) : 0);
}
#define DS_ATOMIC(name, rtn, Op, T)            \
  EMU_HANDLER(name, (ds_atomic<Op, T, false>)) \
  EMU_HANDLER(rtn, (ds_atomic<Op, T, true>))
DS_ATOMIC("ds_add_u32", "ds_add_rtn_u32", Add, u32)
DS_ATOMIC("ds_sub_u32", "ds_sub_rtn_u32", Sub, u32)
DS_ATOMIC("ds_rsub_u32", "ds_rsub_rtn_u32", Rsub, u32)
DS_ATOMIC("ds_inc_u32", "ds_inc_rtn_u32", Inc, u32)
DS_ATOMIC("ds_dec_u32", "ds_dec_rtn_u32", Dec, u32)
DS_ATOMIC("ds_min_i32", "ds_min_rtn_i32", SMin, u32)
DS_ATOMIC("ds_max_i32", "ds_max_rtn_i32", SMax, u32)
DS_ATOMIC("ds_min_u32", "ds_min_rtn_u32", UMin, u32)
DS_ATOMIC("ds_max_u32", "ds_max_rtn_u32", UMax, u32)
DS_ATOMIC("ds_and_b32", "ds_and_rtn_b32", And, u32)
DS_ATOMIC("ds_or_b32", "ds_or_rtn_b32", Or, u32)
DS_ATOMIC("ds_xor_b32", "ds_xor_rtn_b32", Xor, u32)
DS_ATOMIC("ds_cmpst_b32", "ds_cmpst_rtn_b32", CmpSwap, u32)
DS_ATOMIC("ds_add_f32", "ds_add_rtn_f32", AddF32Lds, u32)
DS_ATOMIC("ds_max_f32", "ds_max_rtn_f32", MaxF32, u32)
DS_ATOMIC("ds_min_f32", "ds_min_rtn_f32", MinF32, u32)
DS_ATOMIC("ds_pk_add_f16", "ds_pk_add_rtn_f16", PkAddF16, u32)
DS_ATOMIC("ds_pk_add_bf16", "ds_pk_add_rtn_bf16", PkAddBf16, u32)
DS_ATOMIC("ds_add_f64", "ds_add_rtn_f64", AddF64, u64)
DS_ATOMIC("ds_add_u64", "ds_add_rtn_u64", Add, u64)
DS_ATOMIC("ds_sub_u64", "ds_sub_rtn_u64", Sub, u64)
DS_ATOMIC("ds_rsub_u64", "ds_rsub_rtn_u64", Rsub, u64)
DS_ATOMIC("ds_inc_u64", "ds_inc_rtn_u64", Inc, u64)
DS_ATOMIC("ds_dec_u64", "ds_dec_rtn_u64", Dec, u64)
DS_ATOMIC("ds_min_f64", "ds_min_rtn_f64", MinF64, u64)
DS_ATOMIC("ds_max_f64", "ds_max_rtn_f64", MaxF64, u64)
DS_ATOMIC("ds_min_u64", "ds_min_rtn_u64", UMin, u64)
DS_ATOMIC("ds_max_u64", "ds_max_rtn_u64", UMax, u64)
DS_ATOMIC("ds_min_i64", "ds_min_rtn_i64", SMin, u64)
DS_ATOMIC("ds_max_i64", "ds_max_rtn_i64", SMax, u64)
DS_ATOMIC("ds_and_b64", "ds_and_rtn_b64", And, u64)
DS_ATOMIC("ds_or_b64", "ds_or_rtn_b64", Or, u64)
DS_ATOMIC("ds_xor_b64", "ds_xor_rtn_b64", Xor, u64)
DS_ATOMIC("ds_cmpst_b64", "ds_cmpst_rtn_b64", CmpSwap, u64)
EMU_HANDLER("ds_wrxchg_rtn_b32", (ds_atomic<Swap, u32, true>))
EMU_HANDLER("ds_wrxchg_rtn_b64", (ds_atomic<Swap, u64, true>))

// --- scalar stores and atomics
struct ScalarPlace {
  u64 address;
  i64 room;  // bytes up to num_records; negative: no limit
};
ScalarPlace scalar_place(Wave& w, const Inst& in, bool buffer) {
  i64 offset = in.offset;
  if (in.soffset.code >= 0) offset += w.s[in.soffset.code];
  u64 base = w.pair(in.saddr.code) & (buffer ? 0xffffffffffffull : ~0ull);
  i64 records = buffer ? i64(w.s[in.saddr.code + 2]) : 0;
  return {(base + u64(offset)) & ~3ull, buffer ? std::max<i64>(records - offset, 0) : -1};
}
void finish_scalar(Wave& w, int reg, int count) {
  if (!w.check()) return;
  Outstanding op;
  op.smem = op.scalar = true, op.reg = reg, op.count = count;
  issued(w, false, true, op);
}
template <bool Buffer, int N>
void s_store(Wave& w, const Inst& in) {
  ScalarPlace to = scalar_place(w, in, Buffer);
  for (int i = 0; i < N; ++i)
    if (!Buffer || scalar_in_range(w, 4 * i, 4, to.room))
      std::memcpy(w.launch().memory->store(to.address + 4 * u64(i), 4, -1), &w.s[in.data.code + i],
                  4);
  finish_scalar(w, -1, 0);
}
EMU_HANDLER("s_store_dword", (s_store<false, 1>))
EMU_HANDLER("s_store_dwordx2", (s_store<false, 2>))
EMU_HANDLER("s_store_dwordx4", (s_store<false, 4>))
EMU_HANDLER("s_buffer_store_dword", (s_store<true, 1>))
EMU_HANDLER("s_buffer_store_dwordx2", (s_store<true, 2>))
EMU_HANDLER("s_buffer_store_dwordx4", (s_store<true, 4>))

template <bool Buffer, class Op, class T>
void s_atomic(Wave& w, const Inst& in) {
  constexpr int dwords = sizeof(T) / 4;
  ScalarPlace at = scalar_place(w, in, Buffer);
  if (w.check() && at.address % sizeof(T))
    throw Fault("misaligned access", "scalar atomic", -1, at.address);
  T x, c = 0, old = 0;
  std::memcpy(&x, &w.s[in.data.code], sizeof(T));
  if (std::is_same<Op, CmpSwap>::value) std::memcpy(&c, &w.s[in.data.code + dwords], sizeof(T));
  if (!Buffer || scalar_in_range(w, 0, sizeof(T), at.room)) {
    w.launch().memory->load(at.address, sizeof(T), -1, w.check());
    u8* p = w.launch().memory->store(at.address, sizeof(T), -1);
    std::lock_guard<std::mutex> hold(lock_of(p));
    std::memcpy(&old, p, sizeof(T));
    T fresh = Op::template f<T>(old, x, c);
    std::memcpy(p, &fresh, sizeof(T));
  }
  bool returns = in.flags & kSc0;
  if (returns) std::memcpy(&w.s[in.dst.code], &old, sizeof(T));
  if (w.launch().count) w.wg->stats.atomics++;
  finish_scalar(w, returns ? in.dst.code : -1, returns ? dwords : 0);
}
#define S_ATOMIC(name, Op)                                        \
  EMU_HANDLER("s_atomic_" name, (s_atomic<false, Op, u32>))       \
  EMU_HANDLER("s_atomic_" name "_x2", (s_atomic<false, Op, u64>)) \
  EMU_HANDLER("s_buffer_atomic_" name, (s_atomic<true, Op, u32>)) \
  EMU_HANDLER("s_buffer_atomic_" name "_x2", (s_atomic<true, Op, u64>))
S_ATOMIC("swap", Swap)
S_ATOMIC("cmpswap", CmpSwap)
S_ATOMIC("add", Add)
S_ATOMIC("sub", Sub)
S_ATOMIC("smin", SMin)
S_ATOMIC("umin", UMin)
S_ATOMIC("smax", SMax)
S_ATOMIC("umax", UMax)
S_ATOMIC("and", And)
S_ATOMIC("or", Or)
S_ATOMIC("xor", Xor)
S_ATOMIC("inc", Inc)
S_ATOMIC("dec", Dec)

}  // namespace
}  // namespace emu
