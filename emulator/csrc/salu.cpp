// SPDX-License-Identifier: MIT
// Scalar ALU, control flow and mode registers.
#include "machine.h"

namespace emu {
namespace {

inline u32 S0(Wave& w, const Inst& in) { return scalar32(w, in, in.src[0].code); }
inline u32 S1(Wave& w, const Inst& in) { return scalar32(w, in, in.src[1].code); }
inline u64 D0(Wave& w, const Inst& in) { return scalar64(w, in, in.src[0].code, false); }
inline u64 D1(Wave& w, const Inst& in) { return scalar64(w, in, in.src[1].code, false); }
inline void put32(Wave& w, const Inst& in, u32 x) { w.s[in.dst.code] = x; }
inline void put64(Wave& w, const Inst& in, u64 x) { w.set_pair(in.dst.code, x); }

#define S_OP(name, ...) EMU_HANDLER(name, [](Wave& w, const Inst& in) { __VA_ARGS__ })
// A 32-bit or 64-bit logical result; SCC says "not zero".
#define LOGIC(name, expr)                                                                          \
  S_OP("s_" name "_b32", u32 a = S0(w, in), b = S1(w, in); (void)b; u32 r = expr; put32(w, in, r); \
       w.scc = r != 0;)                                                                            \
  S_OP("s_" name "_b64", u64 a = D0(w, in), b = D1(w, in); (void)b; u64 r = expr; put64(w, in, r); \
       w.scc = r != 0;)
LOGIC("and", a& b)
LOGIC("or", a | b)
LOGIC("xor", a ^ b)
LOGIC("andn2", a & ~b)
LOGIC("orn2", a | ~b)
LOGIC("nand", ~(a& b))
LOGIC("nor", ~(a | b))
LOGIC("xnor", ~(a ^ b))
S_OP("s_not_b32", u32 r = ~S0(w, in); put32(w, in, r); w.scc = r != 0;)
S_OP("s_not_b64", u64 r = ~D0(w, in); put64(w, in, r); w.scc = r != 0;)
S_OP("s_mov_b32", put32(w, in, S0(w, in));)
S_OP("s_mov_b64", put64(w, in, D0(w, in));)
S_OP("s_cmov_b32", if (w.scc) put32(w, in, S0(w, in));)
S_OP("s_cmov_b64", if (w.scc) put64(w, in, D0(w, in));)
S_OP("s_cselect_b32", put32(w, in, w.scc ? S0(w, in) : S1(w, in));)
S_OP("s_cselect_b64", put64(w, in, w.scc ? D0(w, in) : D1(w, in));)

S_OP("s_lshl_b32", u32 r = S0(w, in) << (S1(w, in) & 31); put32(w, in, r); w.scc = r != 0;)
S_OP("s_lshr_b32", u32 r = S0(w, in) >> (S1(w, in) & 31); put32(w, in, r); w.scc = r != 0;)
S_OP("s_ashr_i32", u32 r = u32(i32(S0(w, in)) >> (S1(w, in) & 31)); put32(w, in, r);
     w.scc = r != 0;)
S_OP("s_lshl_b64", u64 r = D0(w, in) << (S1(w, in) & 63); put64(w, in, r); w.scc = r != 0;)
S_OP("s_lshr_b64", u64 r = D0(w, in) >> (S1(w, in) & 63); put64(w, in, r); w.scc = r != 0;)
S_OP("s_ashr_i64", u64 r = u64(i64(D0(w, in)) >> (S1(w, in) & 63)); put64(w, in, r);
     w.scc = r != 0;)
S_OP("s_bfm_b32", put32(w, in, ((1u << (S0(w, in) & 31)) - 1) << (S1(w, in) & 31));)
S_OP("s_bfm_b64", put64(w, in, ((1ull << (S0(w, in) & 63)) - 1) << (S1(w, in) & 63));)
u64 field(u64 x, u32 control, int width, bool is_signed) {
  u32 offset = control & (width - 1), n = (control >> 16) & 127;
  if (n == 0) return 0;
  if (is_signed && width == 32) x = u64(i64(i32(u32(x))));
  u64 shifted =
      is_signed ? u64(i64(x) >> offset) : (width == 32 ? u64(u32(x)) >> offset : x >> offset);
  if (n >= 64) return shifted;
  u64 r = shifted & ((1ull << n) - 1);
  if (is_signed && ((r >> (n - 1)) & 1)) r |= ~0ull << n;
  return r;
}
S_OP("s_bfe_u32", u32 r = u32(field(S0(w, in), S1(w, in), 32, false)); put32(w, in, r);
     w.scc = r != 0;)
S_OP("s_bfe_i32", u32 r = u32(field(S0(w, in), S1(w, in), 32, true)); put32(w, in, r);
     w.scc = r != 0;)
S_OP("s_bfe_u64", u64 r = field(D0(w, in), S1(w, in), 64, false); put64(w, in, r); w.scc = r != 0;)
S_OP("s_bfe_i64", u64 r = field(D0(w, in), S1(w, in), 64, true); put64(w, in, r); w.scc = r != 0;)

S_OP("s_add_u32", u64 r = u64(S0(w, in)) + S1(w, in); put32(w, in, u32(r)); w.scc = r >> 32;)
S_OP("s_sub_u32", u32 a = S0(w, in), b = S1(w, in); put32(w, in, a - b); w.scc = b > a;)
S_OP("s_addc_u32", u64 r = u64(S0(w, in)) + S1(w, in) + w.scc; put32(w, in, u32(r));
     w.scc = r >> 32;)
S_OP("s_subb_u32", u64 a = S0(w, in), b = u64(S1(w, in)) + w.scc; put32(w, in, u32(a - b));
     w.scc = b > a;)
S_OP("s_add_i32", i64 r = i64(i32(S0(w, in))) + i32(S1(w, in)); put32(w, in, u32(r));
     w.scc = r != i64(i32(r));)
S_OP("s_sub_i32", i64 r = i64(i32(S0(w, in))) - i32(S1(w, in)); put32(w, in, u32(r));
     w.scc = r != i64(i32(r));)
S_OP("s_mul_i32", put32(w, in, S0(w, in) * S1(w, in));)
S_OP("s_mul_hi_u32", put32(w, in, u32((u64(S0(w, in)) * S1(w, in)) >> 32));)
S_OP("s_mul_hi_i32", put32(w, in, u32((i64(i32(S0(w, in))) * i32(S1(w, in))) >> 32));)
S_OP("s_min_i32", i32 a = i32(S0(w, in)), b = i32(S1(w, in)); w.scc = a < b;
     put32(w, in, u32(a < b ? a : b));)
S_OP("s_max_i32", i32 a = i32(S0(w, in)), b = i32(S1(w, in)); w.scc = a >= b;
     put32(w, in, u32(a >= b ? a : b));)
S_OP("s_min_u32", u32 a = S0(w, in), b = S1(w, in); w.scc = a < b; put32(w, in, a < b ? a : b);)
S_OP("s_max_u32", u32 a = S0(w, in), b = S1(w, in); w.scc = a >= b; put32(w, in, a >= b ? a : b);)
S_OP("s_absdiff_i32", i32 d = i32(S0(w, in) - S1(w, in)); u32 r = d < 0 ? 0u - u32(d) : u32(d);
     put32(w, in, r); w.scc = r != 0;)
S_OP("s_abs_i32", u32 a = S0(w, in), r = i32(a) < 0 ? 0u - a : a; put32(w, in, r); w.scc = r != 0;)
#define SHIFT_ADD(n, name)                                                    \
  S_OP(name, u64 r = (u64(S0(w, in)) << n) + S1(w, in); put32(w, in, u32(r)); \
       w.scc = (r >> 32) != 0;)
SHIFT_ADD(1, "s_lshl1_add_u32")
SHIFT_ADD(2, "s_lshl2_add_u32")
SHIFT_ADD(3, "s_lshl3_add_u32")
SHIFT_ADD(4, "s_lshl4_add_u32")
S_OP("s_pack_ll_b32_b16", put32(w, in, (S0(w, in) & 0xffff) | (S1(w, in) << 16));)
S_OP("s_pack_lh_b32_b16", put32(w, in, (S0(w, in) & 0xffff) | (S1(w, in) & 0xffff0000u));)
S_OP("s_pack_hh_b32_b16", put32(w, in, (S0(w, in) >> 16) | (S1(w, in) & 0xffff0000u));)

u32 reverse32(u32 x) {
  u32 r = 0;
  for (int i = 0; i < 32; ++i) r |= ((x >> i) & 1) << (31 - i);
  return r;
}
S_OP("s_brev_b32", put32(w, in, reverse32(S0(w, in)));)
S_OP("s_brev_b64", u64 x = D0(w, in);
     put64(w, in, (u64(reverse32(u32(x))) << 32) | reverse32(u32(x >> 32)));)
S_OP("s_bcnt1_i32_b32", u32 r = u32(__builtin_popcount(S0(w, in))); put32(w, in, r);
     w.scc = r != 0;)
S_OP("s_bcnt1_i32_b64", u32 r = u32(__builtin_popcountll(D0(w, in))); put32(w, in, r);
     w.scc = r != 0;)
S_OP("s_bcnt0_i32_b32", u32 r = u32(__builtin_popcount(~S0(w, in))); put32(w, in, r);
     w.scc = r != 0;)
S_OP("s_bcnt0_i32_b64", u32 r = u32(__builtin_popcountll(~D0(w, in))); put32(w, in, r);
     w.scc = r != 0;)
S_OP("s_ff1_i32_b32", u32 x = S0(w, in); put32(w, in, x ? u32(__builtin_ctz(x)) : ~0u);)
S_OP("s_ff1_i32_b64", u64 x = D0(w, in); put32(w, in, x ? u32(__builtin_ctzll(x)) : ~0u);)
S_OP("s_ff0_i32_b32", u32 x = ~S0(w, in); put32(w, in, x ? u32(__builtin_ctz(x)) : ~0u);)
S_OP("s_ff0_i32_b64", u64 x = ~D0(w, in); put32(w, in, x ? u32(__builtin_ctzll(x)) : ~0u);)
S_OP("s_flbit_i32_b32", u32 x = S0(w, in); put32(w, in, x ? u32(__builtin_clz(x)) : ~0u);)
S_OP("s_flbit_i32_b64", u64 x = D0(w, in); put32(w, in, x ? u32(__builtin_clzll(x)) : ~0u);)
S_OP("s_flbit_i32", u32 x = S0(w, in); u32 y = i32(x) < 0 ? ~x : x;
     put32(w, in, y ? u32(__builtin_clz(y)) : ~0u);)
S_OP("s_flbit_i32_i64", u64 x = D0(w, in); u64 y = i64(x) < 0 ? ~x : x;
     put32(w, in, y ? u32(__builtin_clzll(y)) : ~0u);)
S_OP("s_sext_i32_i8", put32(w, in, u32(i32(i8(S0(w, in)))));)
S_OP("s_sext_i32_i16", put32(w, in, u32(i32(i16(S0(w, in)))));)
S_OP("s_bitset0_b32", w.s[in.dst.code] &= ~(1u << (S0(w, in) & 31));)
S_OP("s_bitset1_b32", w.s[in.dst.code] |= 1u << (S0(w, in) & 31);)
S_OP("s_bitset0_b64", put64(w, in, w.pair(in.dst.code) & ~(1ull << (S0(w, in) & 63)));)
S_OP("s_bitset1_b64", put64(w, in, w.pair(in.dst.code) | (1ull << (S0(w, in) & 63)));)
S_OP("s_bitreplicate_b64_b32", u32 x = S0(w, in); u64 r = 0;
     for (int i = 0; i < 32; ++i) r |= u64((x >> i) & 1) * 3 << (2 * i); put64(w, in, r);)
S_OP("s_quadmask_b32", u32 x = S0(w, in), r = 0;
     for (int i = 0; i < 8; ++i) r |= u32(((x >> (4 * i)) & 15) != 0) << i; put32(w, in, r);
     w.scc = r != 0;)
S_OP("s_quadmask_b64", u64 x = D0(w, in), r = 0;
     for (int i = 0; i < 16; ++i) r |= u64(((x >> (4 * i)) & 15) != 0) << i; put64(w, in, r);
     w.scc = r != 0;)
S_OP("s_wqm_b64", u64 x = D0(w, in), r = 0;
     for (int i = 0; i < 16; ++i) if ((x >> (4 * i)) & 15) r |= 15ull << (4 * i); put64(w, in, r);
     w.scc = r != 0;)

// saveexec: D = EXEC, EXEC = f(S0, EXEC)
#define SAVE(name, expr)                                                                          \
  S_OP("s_" name "_saveexec_b64", u64 s = D0(w, in), e = w.exec(); u64 r = expr; put64(w, in, e); \
       w.set_pair(kExecLo, r); w.scc = r != 0;)
SAVE("and", s& e)
SAVE("or", s | e)
SAVE("xor", s ^ e)
SAVE("andn2", s & ~e)
SAVE("orn2", s | ~e)
SAVE("nand", ~(s& e))
SAVE("nor", ~(s | e))
SAVE("xnor", ~(s ^ e))
SAVE("andn1", ~s& e)
SAVE("orn1", ~s | e)
S_OP("s_andn1_wrexec_b64", u64 r = ~D0(w, in) & w.exec(); w.set_pair(kExecLo, r); put64(w, in, r);
     w.scc = r != 0;)
S_OP("s_andn2_wrexec_b64", u64 r = D0(w, in) & ~w.exec(); w.set_pair(kExecLo, r); put64(w, in, r);
     w.scc = r != 0;)

#define COMPARE(name, T, op)                                 \
  S_OP("s_cmp_" name, w.scc = T(S0(w, in)) op T(S1(w, in));) \
  S_OP("s_cmpk_" name, w.scc = T(w.s[in.dst.code]) op T(     \
                           std::is_signed<T>::value ? i32(i16(in.simm)) : i32(u16(in.simm)));)
COMPARE("eq_i32", i32, ==)
COMPARE("lg_i32", i32, !=)
COMPARE("gt_i32", i32, >)
COMPARE("ge_i32", i32, >=)
COMPARE("lt_i32", i32, <)
COMPARE("le_i32", i32, <=)
COMPARE("eq_u32", u32, ==)
COMPARE("lg_u32", u32, !=)
COMPARE("gt_u32", u32, >)
COMPARE("ge_u32", u32, >=)
COMPARE("lt_u32", u32, <)
COMPARE("le_u32", u32, <=)
S_OP("s_cmp_eq_u64", w.scc = D0(w, in) == D1(w, in);)
S_OP("s_cmp_lg_u64", w.scc = D0(w, in) != D1(w, in);)
S_OP("s_bitcmp0_b32", w.scc = !((S0(w, in) >> (S1(w, in) & 31)) & 1);)
S_OP("s_bitcmp1_b32", w.scc = (S0(w, in) >> (S1(w, in) & 31)) & 1;)
S_OP("s_bitcmp0_b64", w.scc = !((D0(w, in) >> (S1(w, in) & 63)) & 1);)
S_OP("s_bitcmp1_b64", w.scc = (D0(w, in) >> (S1(w, in) & 63)) & 1;)

S_OP("s_movk_i32", put32(w, in, u32(i32(i16(in.simm))));)
S_OP("s_cmovk_i32", if (w.scc) put32(w, in, u32(i32(i16(in.simm))));)
S_OP("s_addk_i32", i64 r = i64(i32(w.s[in.dst.code])) + i16(in.simm); put32(w, in, u32(r));
     w.scc = r != i64(i32(r));)
S_OP("s_mulk_i32", put32(w, in, w.s[in.dst.code] * u32(i32(i16(in.simm))));)

// --- mode registers: only MODE (1) and read-only ids are modelled
constexpr u32 kModeRegister = 1;
void setreg(Wave& w, u32 value, u32 control) {
  u32 offset = (control >> 6) & 31, size = ((control >> 11) & 31) + 1;
  if ((control & 63) != kModeRegister)
    throw Fault("unimplemented", "s_setreg of hardware register " + std::to_string(control & 63));
  u32 mask = (size == 32 ? ~0u : (1u << size) - 1) << offset;
  w.set_mode((w.mode & ~mask) | ((value << offset) & mask));
}
S_OP("s_setreg_b32", setreg(w, w.s[in.dst.code], u32(in.simm));)
S_OP("s_setreg_imm32_b32", setreg(w, in.literal, u32(in.simm));)
S_OP("s_getreg_b32", u32 control = u32(in.simm), offset = (control >> 6) & 31,
     size = ((control >> 11) & 31) + 1;
     if ((control & 63) != kModeRegister) throw Fault("unimplemented",
                                                      "s_getreg of hardware register " +
                                                          std::to_string(control & 63));
     put32(w, in, (w.mode >> offset) & (size == 32 ? ~0u : (1u << size) - 1));)

S_OP("s_setvskip", bool on = (S0(w, in) >> (S1(w, in) & 31)) & 1;
     w.set_mode(on ? w.mode | kModeVskip : w.mode & ~kModeVskip);)

// --- relative VGPR addressing
void index_mode(Wave& w, u32 which) {
  w.s[kM0] = (w.s[kM0] & ~0xf000u) | ((which & 15) << 12);
  w.sdefined[1] |= 1ull << (kM0 - 64);
}
S_OP("s_set_gpr_idx_on", w.set_mode(w.mode | kModeGprIndex);
     w.s[kM0] = (w.s[kM0] & ~255u) | (S0(w, in) & 255); index_mode(w, u32(in.simm));)
S_OP("s_set_gpr_idx_off", (void)in; w.set_mode(w.mode & ~kModeGprIndex);)
S_OP("s_set_gpr_idx_mode", index_mode(w, u32(in.simm));)
S_OP("s_set_gpr_idx_idx", w.s[kM0] = (w.s[kM0] & ~255u) | (S0(w, in) & 255);)

// --- relative scalar addressing: M0 moves the source or the destination, which decode.py puts in
// simm.
int moved_sgpr(Wave& w, const Inst& in, int dwords) {
  if (w.check() && !(w.sdefined[1] >> (kM0 - 64) & 1))
    throw Fault("uninitialized register", "moves by M0, which nothing wrote");
  u32 code = u32(in.simm) + w.s[kM0];
  if (code > u32(kSgprs - dwords))
    throw Fault("register out of range",
                "a relative move ends past s" + std::to_string(kSgprs - 1));
  return int(code);
}
template <int N>
void movrels(Wave& w, const Inst& in) {
  Operand from{moved_sgpr(w, in, N), N};
  if (w.check()) read_scalar(w, from);
  for (int i = 0; i < N; ++i) w.s[in.dst.code + i] = w.s[from.code + i];
}
template <int N>
void movreld(Wave& w, const Inst& in) {
  Operand to{moved_sgpr(w, in, N), N};
  u64 x = N == 2 ? D0(w, in) : S0(w, in);
  if (w.check()) write_scalar(w, to);
  for (int i = 0; i < N; ++i) w.s[to.code + i] = u32(x >> (32 * i));
}
EMU_HANDLER("s_movrels_b32", movrels<1>)
EMU_HANDLER("s_movrels_b64", movrels<2>)
EMU_HANDLER("s_movreld_b32", movreld<1>)
EMU_HANDLER("s_movreld_b64", movreld<2>)

// --- control flow
void jump(Wave& w, const Inst& in) {
  if (in.target < 0) throw Fault("bad branch", "jumps to a place where no instruction starts");
  w.pc = u32(in.target);
}
S_OP("s_branch", jump(w, in);)
S_OP("s_cbranch_scc0", if (!w.scc) jump(w, in);)
S_OP("s_cbranch_scc1", if (w.scc) jump(w, in);)
S_OP("s_cbranch_vccz", if (w.vcc() == 0) jump(w, in);)
S_OP("s_cbranch_vccnz", if (w.vcc() != 0) jump(w, in);)
S_OP("s_cbranch_execz", if (w.exec() == 0) jump(w, in);)
S_OP("s_cbranch_execnz", if (w.exec() != 0) jump(w, in);)
u64 next_address(Wave& w, const Inst& in) {
  return w.launch().program->code_address + in.pc + in.size;
}
void jump_to(Wave& w, u64 address) {
  Program& p = *w.launch().program;
  u64 offset = address - p.code_address;
  if (address < p.code_address || offset / 4 >= p.at.size() || offset % 4 || p.at[offset / 4] < 0)
    throw Fault("bad branch", "jumps outside the code", -1, address);
  w.pc = u32(p.at[offset / 4]);
}
S_OP("s_getpc_b64", put64(w, in, next_address(w, in));)
S_OP("s_setpc_b64", jump_to(w, D0(w, in));)
S_OP("s_swappc_b64", u64 to = D0(w, in); put64(w, in, next_address(w, in)); jump_to(w, to);)
S_OP("s_call_b64", put64(w, in, next_address(w, in)); jump(w, in);)

S_OP("s_endpgm", (void)in; w.status = Wave::done;)
S_OP("s_barrier", (void)in; w.status = Wave::barrier;)
S_OP("s_waitcnt", u32 x = u32(in.simm);
     if (w.launch().tracks()) waited(w, (x & 15) | ((x >> 10) & 48), (x >> 8) & 15);)
#define NO_OP(name) EMU_HANDLER(name, [](Wave&, const Inst&) {})
NO_OP("s_nop")
NO_OP("s_sleep")
NO_OP("s_setprio")
NO_OP("s_inst_prefetch")
NO_OP("s_icache_inv")
NO_OP("s_sethalt")
NO_OP("s_wakeup")
NO_OP("s_incperflevel")
NO_OP("s_decperflevel")
NO_OP("s_ttracedata")
NO_OP("s_dcache_wb")
NO_OP("s_dcache_inv")
NO_OP("s_dcache_wb_vol")
NO_OP("s_dcache_inv_vol")
S_OP("s_trap",
     throw Fault("trap", "s_trap " + std::to_string(in.simm) + " (an assertion or __builtin_trap)");
     (void)w;)

// --- scalar memory
void smem_load(Wave& w, const Inst& in, u64 base, i64 limit, int dwords) {
  i64 offset = in.offset;
  if (in.soffset.code >= 0) offset += w.s[in.soffset.code];
  u64 address = (base + u64(offset)) & ~3ull;
  for (int i = 0; i < dwords; ++i) {
    if (limit >= 0 && !scalar_in_range(w, offset + 4 * i, 4, limit)) {
      w.s[in.dst.code + i] = 0;
      continue;
    }
    std::memcpy(&w.s[in.dst.code + i],
                w.launch().memory->load(address + 4 * u64(i), 4, -1, w.check()), 4);
  }
  if (w.check()) {
    Outstanding op;
    op.smem = op.scalar = true, op.reg = in.dst.code, op.count = dwords;
    issued(w, false, true, op);
  }
}
template <int N>
void s_load(Wave& w, const Inst& in) {
  smem_load(w, in, w.pair(in.saddr.code), -1, N);
}
template <int N>
void s_buffer_load(Wave& w, const Inst& in) {
  u64 base = w.pair(in.saddr.code) & 0xffffffffffffull;
  smem_load(w, in, base, i64(w.s[in.saddr.code + 2]), N);
}
EMU_HANDLER("s_load_dword", s_load<1>)
EMU_HANDLER("s_load_dwordx2", s_load<2>)
EMU_HANDLER("s_load_dwordx4", s_load<4>)
EMU_HANDLER("s_load_dwordx8", s_load<8>)
EMU_HANDLER("s_load_dwordx16", s_load<16>)
EMU_HANDLER("s_buffer_load_dword", s_buffer_load<1>)
EMU_HANDLER("s_buffer_load_dwordx2", s_buffer_load<2>)
EMU_HANDLER("s_buffer_load_dwordx4", s_buffer_load<4>)
EMU_HANDLER("s_buffer_load_dwordx8", s_buffer_load<8>)
EMU_HANDLER("s_buffer_load_dwordx16", s_buffer_load<16>)
void clock(Wave& w, const Inst& in) {
  w.set_pair(in.dst.code, w.executed);  // a count that rises; no time is modelled
  if (w.check()) {
    Outstanding op;
    op.smem = op.scalar = true, op.reg = in.dst.code, op.count = 2;
    issued(w, false, true, op);
  }
}
EMU_HANDLER("s_memtime", clock)
EMU_HANDLER("s_memrealtime", clock)

}  // namespace
}  // namespace emu
