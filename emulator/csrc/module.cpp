// SPDX-License-Identifier: MIT
// Scheduler and Python binding: runs workgroups on all cores, waves of a workgroup in turns.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <memory>
#include <random>
#include <thread>

#include "machine.h"

namespace py = pybind11;

#ifndef EMU_MODULE
#define EMU_MODULE _core
#endif

namespace emu {
namespace {

struct Failure {
  bool set = false;
  std::string kind, what;
  u32 pc = 0;
  int lane = -1, wave = 0;
  u32 wg[3] = {0, 0, 0};
  bool has_address = false;
  u64 address = 0;
  Access earlier;
};

struct Setup {
  u32 grid[3], block[3];
  std::vector<u32> sgprs;  // user SGPRs
  bool wg_id[3];           // which workgroup ids follow
  u32 mode;
  u32 entry;
  i64 seed;  // -1: natural order
  u64 latency_seed;
  int threads;
};

void unimplemented(Wave& w, const Inst& in) {
  throw Fault("unimplemented", "instruction " + w.launch().program->names[size_t(in.name)]);
}

void bad_registers(Wave& w, const Inst& in) {
  throw Fault("register out of range", "instruction " + w.launch().program->names[size_t(in.name)] +
                                           " names registers past the last one");
}
// Whether every operand lies inside its register file.
bool registers_exist(const Inst& in) {
  for (const Operand* o : {&in.dst, &in.sdst, &in.src[0], &in.src[1], &in.src[2], &in.data,
                           &in.addr, &in.saddr, &in.soffset}) {
    int end = o->code + o->dwords;
    if (o->code >= kAgpr                ? end > kAgpr + 256
        : o->code >= kVgpr              ? end > kAgpr
        : o->code >= 0 && o->code < 128 ? end > 128
                                        : false)
      return false;
  }
  return true;
}

struct Worker {
  Launch& launch;
  const Setup& setup;
  std::vector<u64> counts;
  std::vector<std::unique_ptr<Wave>> waves;
  std::vector<u32> registers;
  Workgroup group;
  Stats total;
  Failure failure;

  Worker(Launch& l, const Setup& s) : launch(l), setup(s), counts(l.program->insts.size(), 0) {
    u32 items = s.block[0] * s.block[1] * s.block[2];
    u32 n = (items + kLanes - 1) / kLanes;
    registers.resize(size_t(n) * 512 * kLanes + 32);
    auto base = reinterpret_cast<std::uintptr_t>(registers.data());
    u32* aligned = registers.data() + ((128 - base % 128) % 128) / 4;
    for (u32 i = 0; i < n; ++i) {
      waves.push_back(std::make_unique<Wave>());
      waves.back()->v = reinterpret_cast<u32(*)[kLanes]>(aligned + size_t(i) * 512 * kLanes);
      waves.back()->id = int(i);
    }
    group.launch = &launch;
    group.lds.resize(launch.lds_size);
    if (launch.check) group.marks.resize(launch.lds_size), group.history.resize(launch.lds_size);
  }

  void reset(Wave& w) {
    u32(*v)[kLanes] = w.v;
    int id = w.id;
    auto scratch = std::move(w.scratch);
    auto scratch_defined = std::move(w.scratch_defined);
    w = Wave();
    w.v = v, w.id = id, w.wg = &group, w.pc = setup.entry;
    w.set_mode(setup.mode);
    for (u32 r = 0; r < launch.arch_vgprs; ++r)
      for (int l = 0; l < kLanes; ++l) v[r][l] = kPoison;
    for (u32 r = 0; r < launch.acc_vgprs; ++r)
      for (int l = 0; l < kLanes; ++l) v[256 + r][l] = kPoison;
    for (u32& s : w.s) s = kPoison;
    u32 items = setup.block[0] * setup.block[1] * setup.block[2], first = u32(id) * kLanes;
    u32 n = std::min<u32>(kLanes, items - first);
    w.live = n == kLanes ? kAllLanes : (1ull << n) - 1;
    w.set_pair(kExecLo, w.live);
    for (u32 l = 0; l < n; ++l) {
      u32 flat = first + l, x = flat % setup.block[0], y = flat / setup.block[0] % setup.block[1],
          z = flat / setup.block[0] / setup.block[1];
      v[0][l] = x | (y << 10) | (z << 20);
    }
    int s = 0;
    for (u32 value : setup.sgprs) w.s[s++] = value;
    for (int d = 0; d < 3; ++d)
      if (setup.wg_id[d]) w.s[s++] = group.id[d];
    w.defined[0] = w.live;
    for (int i = 0; i < s; ++i) w.sdefined[size_t(i) / 64] |= 1ull << (i % 64);
    w.sdefined[1] |= 3ull << (kExecLo - 64);
    w.scratch = std::move(scratch), w.scratch_defined = std::move(scratch_defined);
    w.scratch.assign(size_t(launch.scratch_size) * kLanes, 0xa5);
    if (launch.check) w.scratch_defined.assign(w.scratch.size(), 0);
  }

  // VGPR indexing: M0[7:0] is added to the vector registers, of either file, of the operands that
  // M0[15:12] names (src0, src1, src2, dst).
  static Inst indexed(const Wave& w, Inst in) {
    if (in.flags & kNotIndexed)
      throw Fault("unimplemented",
                  "VGPR indexing of " + w.launch().program->names[size_t(in.name)]);
    if (w.check() && !(w.sdefined[1] >> (kM0 - 64) & 1))
      throw Fault("uninitialized register", "VGPR indexing by M0, which nothing wrote");
    int by = int(w.s[kM0] & 255);
    u32 which = w.s[kM0] >> 12;
    auto move = [&](Operand& o) {
      if (o.code < kVgpr) return;
      int end = o.code >= kAgpr ? kAgpr + 256 : kAgpr;
      o.code += by;
      if (o.code + o.dwords > end)
        throw Fault("register out of range", end == kAgpr ? "an indexed operand ends past v255"
                                                          : "an indexed operand ends past a255");
    };
    if (which & 1) move(in.src[0]);
    if (which & 2) move(in.src[1]);
    if (which & (in.flags & kSumsIntoDst ? 8 : 4)) move(in.src[2]);
    if (which & 8) move(in.dst);
    return in;
  }

  // Runs one wave until it waits, ends, or has had its turn.
  template <bool Check, bool Defer>
  void turn(Wave& w) {
    Program& p = *launch.program;
    const Inst* insts = p.insts.data();
    const u32 size = u32(p.insts.size());
    u64 limit = w.executed + (1u << 20);
    while (w.status == Wave::ready && w.executed < limit) {
      if (w.pc >= size) throw Fault("bad branch", "runs past the end of the code");
      const Inst& in = insts[w.pc++];
      w.executed++;
      if (w.mode & (kModeGprIndex | kModeVskip) && in.kind >= kValu) {
        if (w.mode & kModeVskip) continue;
        if (in.kind <= kMfma) {
          counts[in.index]++;
          const Inst moved = indexed(w, in);
          if (Check) before(w, moved);
          moved.run(w, moved);
          if (Check) after(w, moved);
          continue;
        }
      }
      counts[in.index]++;
      if (Check) before(w, in);
      if (Defer && defers(in))
        defer(w, in);
      else
        in.run(w, in);
      if (Check) after(w, in);
      if (Defer && launch.latency == Launch::random) land_some(w);
    }
    if (Defer && w.status == Wave::done) waited(w, 0, 0);
    if (launch.max_instructions && w.executed > launch.max_instructions)
      throw Fault(
          "instruction limit",
          "a wave executed more than " + std::to_string(launch.max_instructions) + " instructions");
  }

  u32 pc_of(u32 index) const {
    auto& insts = launch.program->insts;
    return insts[std::min<size_t>(index, insts.size() - 1)].pc;
  }

  bool run_group(const u32* id, std::mt19937_64* random) {
    std::copy(id, id + 3, group.id);
    group.phase = 0;
    group.stats = Stats();
    group.issued.clear();
    std::fill(group.lds.begin(), group.lds.end(), u8(0xa5));
    std::fill(group.marks.begin(), group.marks.end(), LdsMark());
    for (auto& w : waves) {
      reset(*w);
      std::seed_seq seeds{
          u32(setup.latency_seed), u32(setup.latency_seed >> 32), id[0], id[1], id[2], u32(w->id)};
      if (launch.latency == Launch::random) w->random.seed(seeds);
    }
    std::vector<Wave*> order;
    for (auto& w : waves) order.push_back(w.get());
    size_t alive = order.size();
    while (alive) {
      if (random) std::shuffle(order.begin(), order.end(), *random);
      size_t waiting = 0, done = 0;
      for (Wave* w : order) {
        if (w->status == Wave::ready) {
          try {
            if (launch.latency == Launch::early)
              launch.check ? turn<true, false>(*w) : turn<false, false>(*w);
            else
              launch.check ? turn<true, true>(*w) : turn<false, true>(*w);
          } catch (const Fault& f) {
            // A deferred operation may be another wave's.
            for (Wave* other : order)
              if (other->landing) w = other;
            failure.set = true;
            failure.kind = f.kind, failure.what = f.what(), failure.lane = f.lane,
            failure.wave = w->id;
            failure.has_address = f.has_address, failure.address = f.address;
            failure.earlier = f.earlier;
            // A branch has moved pc already: the last executed one is what failed only for faults
            // inside it.
            failure.pc = pc_of(w->current());
            std::copy(id, id + 3, failure.wg);
            return false;
          }
        }
        if (w->status == Wave::barrier) ++waiting;
        if (w->status == Wave::done) ++done;
      }
      alive = order.size() - done;
      if (alive && waiting == alive) {
        group.phase++;
        group.stats.barriers++;
        for (Wave* w : order)
          if (w->status == Wave::barrier) {
            w->status = Wave::ready;
            if (launch.check) passed_barrier(*w);
          }
      }
    }
    group.stats.waves += waves.size();
    group.stats.workgroups++;
    total.add(group.stats);
    return true;
  }
};

constexpr int kFields = 64;

// Field order of a decoded record: FIELDS in decode.py.
Inst from_record(const i32* r) {
  Inst in;
  int i = 0;
  auto operand = [&](Operand& o) { o.code = r[i], o.dwords = r[i + 1], i += 2; };
  in.name = r[i++], in.pc = u32(r[i++]), in.size = u32(r[i++]), in.kind = r[i++];
  operand(in.dst), operand(in.sdst);
  for (auto& s : in.src) operand(s);
  operand(in.data), operand(in.addr), operand(in.saddr), operand(in.soffset);
  in.literal = u32(r[i++]);
  in.neg = u32(r[i++]), in.abs = u32(r[i++]), in.clamp = u32(r[i++]), in.omod = u32(r[i++]);
  in.opsel = u32(r[i++]), in.opsel_hi = u32(r[i++]);
  in.dpp = r[i++], in.bound_ctrl = u32(r[i++]), in.row_mask = u32(r[i++]),
  in.bank_mask = u32(r[i++]);
  in.sdwa = u32(r[i++]), in.dst_sel = u32(r[i++]), in.dst_unused = u32(r[i++]),
  in.sel0 = u32(r[i++]), in.sel1 = u32(r[i++]);
  in.sext = u32(r[i++]);
  in.offset = r[i++], in.offset1 = r[i++], in.flags = u32(r[i++]);
  in.cbsz = u32(r[i++]), in.abid = u32(r[i++]), in.blgp = u32(r[i++]), in.scale0 = r[i++],
  in.scale1 = r[i++];
  in.simm = r[i++];
  in.modified = in.dpp >= 0 || in.sdwa;
  return in;
}

struct PyProgram {
  Program p;
  PyProgram(py::array_t<i32, py::array::c_style | py::array::forcecast> records,
            std::vector<std::string> names, u32 code_size) {
    if (records.ndim() != 2 || records.shape(1) != kFields)
      throw std::invalid_argument("records: expected [n, 64] int32");
    p.names = std::move(names);
    p.at.assign(code_size / 4 + 1, -1);
    auto& table = handlers();
    std::vector<Handler> by_name;
    for (auto& n : p.names) {
      auto it = table.find(n);
      by_name.push_back(it == table.end() ? unimplemented : it->second);
    }
    for (py::ssize_t k = 0; k < records.shape(0); ++k) {
      Inst in = from_record(records.data(k, 0));
      in.index = u32(k);
      in.run = by_name[size_t(in.name)];
      if (!registers_exist(in)) {  // damaged code: nothing may look at its operands
        Inst bad;
        bad.name = in.name, bad.pc = in.pc, bad.size = in.size, bad.index = in.index;
        bad.run = bad_registers;
        in = bad;
      }
      in.merges = p.names[size_t(in.name)].find("_d16") != std::string::npos;
      p.at[in.pc / 4] = i32(k);
      p.insts.push_back(in);
    }
    for (Inst& in : p.insts) {
      i64 to = i64(in.pc) + 4 + 4 * i64(i16(in.simm));
      if (to >= 0 && to % 4 == 0 && size_t(to / 4) < p.at.size()) in.target = p.at[size_t(to / 4)];
    }
  }
};

struct PyMemory {
  Memory m;
  std::vector<py::object> keep;
  std::vector<std::vector<u8>> shadows;
  std::vector<int> has_defined;
  // Returns the fake address of the first byte.
  u64 map(py::buffer buffer, u64 write_lo, u64 write_hi, bool undefined, bool count,
          const std::string& label) {
    py::buffer_info info = buffer.request();
    Region r;
    r.host = static_cast<u8*>(info.ptr);
    r.size = u64(info.size) * u64(info.itemsize);
    r.write_lo = write_lo, r.write_hi = write_hi;
    r.label = label;
    auto shadow = [&]() {
      shadows.emplace_back(r.size, u8(0));
      return shadows.back().data();
    };
    if (undefined) r.defined = shadow();
    if (count) r.read = shadow(), r.written = shadow();
    keep.push_back(buffer);
    m.regions.push_back(r);
    return Memory::address_of(m.regions.size() - 1);
  }
  // Host memory at its true address: (address, bytes, writable, address of a byte map of what is
  // written or 0, label), ascending and disjoint. The caller keeps it alive.
  void map_host(const std::vector<std::tuple<u64, u64, bool, u64, std::string>>& list) {
    for (auto& [address, size, writable, defined, label] : list) {
      Region r;
      r.host = reinterpret_cast<u8*>(address);
      r.size = size;
      r.write_hi = writable ? size : 0;
      r.defined = reinterpret_cast<u8*>(defined);
      r.label = label;
      if (!m.host_regions.empty() &&
          address < m.host_regions.back().first + m.host_regions.back().second.size)
        throw std::invalid_argument("map_host: regions overlap or are out of order at " + label);
      m.host_regions.emplace_back(address, r);
    }
  }
  // Unique bytes read and written over all regions whose label starts with the prefix.
  std::pair<u64, u64> touched(const std::string& prefix) const {
    u64 read = 0, written = 0;
    for (auto& r : m.regions)
      if (r.read && r.label.rfind(prefix, 0) == 0) {
        read += u64(std::count(r.read, r.read + r.size, u8(1)));
        written += u64(std::count(r.written, r.written + r.size, u8(1)));
      }
    return {read, written};
  }
};

py::dict run(PyProgram& program, PyMemory& memory, py::dict d) {
  Launch launch;
  Setup setup;
  launch.program = &program.p;
  launch.memory = &memory.m;
  program.p.code_address = d["code_address"].cast<u64>();
  launch.check = d["check"].cast<bool>();
  launch.count = d["count"].cast<bool>();
  launch.lds_size = d["lds_size"].cast<u32>();
  launch.scratch_size = d["scratch_size"].cast<u32>();
  launch.arch_vgprs = d["arch_vgprs"].cast<u32>();
  launch.acc_vgprs = d["acc_vgprs"].cast<u32>();
  launch.max_instructions = d["max_instructions"].cast<u64>();
  launch.unaligned = d["unaligned"].cast<bool>();
  launch.straddling = Launch::Straddling(d["straddling"].cast<int>());
  launch.strict_races = d["strict_races"].cast<bool>();
  launch.latency = d["latency"].cast<std::string>() == "early"  ? Launch::early
                   : d["latency"].cast<std::string>() == "late" ? Launch::late
                                                                : Launch::random;
  setup.latency_seed = d["latency_seed"].cast<u64>();
  auto grid = d["grid"].cast<std::array<u32, 3>>(), block = d["block"].cast<std::array<u32, 3>>();
  std::copy(grid.begin(), grid.end(), setup.grid);
  std::copy(block.begin(), block.end(), setup.block);
  setup.sgprs = d["sgprs"].cast<std::vector<u32>>();
  auto ids = d["wg_id"].cast<std::array<bool, 3>>();
  std::copy(ids.begin(), ids.end(), setup.wg_id);
  setup.mode = d["mode"].cast<u32>();
  setup.seed = d["seed"].cast<i64>();
  setup.threads = d["threads"].cast<int>();
  u32 entry = d["entry"].cast<u32>();
  if (entry / 4 >= program.p.at.size() || program.p.at[entry / 4] < 0)
    throw std::invalid_argument("entry: no instruction there");
  setup.entry = u32(program.p.at[entry / 4]);

  u64 groups = u64(grid[0]) * grid[1] * grid[2];
  std::vector<u64> order;
  if (setup.seed >= 0) {
    order.resize(groups);
    for (u64 i = 0; i < groups; ++i) order[i] = i;
    std::mt19937_64 random(static_cast<u64>(setup.seed));
    std::shuffle(order.begin(), order.end(), random);
  }
  int threads = int(std::min<u64>(std::max(1, setup.threads), std::max<u64>(1, groups)));
  std::vector<std::unique_ptr<Worker>> workers;
  for (int t = 0; t < threads; ++t) workers.push_back(std::make_unique<Worker>(launch, setup));
  std::atomic<u64> next{0};
  std::atomic<bool> stop{false};
  auto work = [&](Worker& worker) {
    for (u64 i; !stop && (i = next++) < groups;) {
      u64 g = order.empty() ? i : order[i];
      u32 id[3] = {u32(g % grid[0]), u32(g / grid[0] % grid[1]), u32(g / grid[0] / grid[1])};
      std::mt19937_64 random(static_cast<u64>(setup.seed) * 0x9e3779b97f4a7c15ull + g);
      if (!worker.run_group(id, setup.seed >= 0 ? &random : nullptr)) stop = true;
    }
  };
  {
    py::gil_scoped_release release;
    std::vector<std::thread> pool;
    for (int t = 1; t < threads; ++t) pool.emplace_back(work, std::ref(*workers[size_t(t)]));
    work(*workers[0]);
    for (auto& t : pool) t.join();
  }
  py::dict out;
  std::vector<u64> counts(program.p.insts.size(), 0);
  Stats total;
  for (auto& w : workers) {
    for (size_t i = 0; i < counts.size(); ++i) counts[i] += w->counts[i];
    total.add(w->total);
    if (w->failure.set && !out.contains("fault")) {
      const Failure& f = w->failure;
      py::dict e;
      e["kind"] = f.kind, e["what"] = f.what, e["pc"] = f.pc, e["wave"] = f.wave;
      e["lane"] = f.lane < 0 ? py::object(py::none()) : py::object(py::int_(f.lane));
      e["address"] = f.has_address ? py::object(py::int_(f.address)) : py::object(py::none());
      e["workgroup"] = py::make_tuple(f.wg[0], f.wg[1], f.wg[2]);
      e["earlier"] = f.earlier.wave < 0 ? py::object(py::none())
                                        : py::make_tuple(w->pc_of(f.earlier.index), f.earlier.wave);
      out["fault"] = e;
    }
  }
  out["counts"] = py::array_t<u64>(py::ssize_t(counts.size()), counts.data());
#define STAT(name) out[#name] = total.name
  STAT(lds_accesses);
  STAT(lds_cycles);
  STAT(lds_least_cycles);
  STAT(lds_bytes);
  STAT(lds_underaligned);
  STAT(vmem_accesses);
  STAT(lines);
  STAT(least_lines);
  STAT(vmem_bytes);
  STAT(atomics);
  STAT(waves);
  STAT(barriers);
  STAT(workgroups);
#undef STAT
  return out;
}

}  // namespace
}  // namespace emu

PYBIND11_MODULE(EMU_MODULE, m) {
  m.doc() = "gfx950 instruction execution";
  m.attr("FIELDS") = emu::kFields;
  py::class_<emu::PyProgram>(m, "Program")
      .def(py::init<py::array_t<int32_t, py::array::c_style | py::array::forcecast>,
                    std::vector<std::string>, uint32_t>());
  py::class_<emu::PyMemory>(m, "Memory")
      .def(py::init<>())
      .def("map", &emu::PyMemory::map)
      .def("map_host", &emu::PyMemory::map_host)
      .def("touched", &emu::PyMemory::touched);
  m.def("run", &emu::run);
  m.def("implemented", [] {
    std::vector<std::string> names;
    for (auto& kv : emu::handlers()) names.push_back(kv.first);
    return names;
  });
  m.def("cpu_level", [] {
#if defined(__x86_64__) && defined(__GNUC__)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
      return 4;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return 3;
    return 2;
#else
    return 0;
#endif
  });
}
