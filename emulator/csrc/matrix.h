// SPDX-License-Identifier: MIT
// What dense and sparse matrix instructions share: where C, D and the elements of A and B live.
//
// Layouts: row i of A (column j of B) lives in lanes with lane % dim == i. D[i][j] lives in
//   16x16: lane 16*(i/4) + j, register i%4;   32x32: lane 32*((i/4)%2) + j, register 4*(i/8) + i%4.
#pragma once
#include "lanes.h"

namespace emu {

inline void no_modifiers(const Inst& in) {
  if (in.neg || in.abs || in.clamp)
    throw Fault("unimplemented", "modifiers on a matrix instruction");
}

inline int d_lane(int dim, int i, int j) {
  return dim == 16 ? 16 * (i / 4) + j : 32 * ((i / 4) % 2) + j;
}
inline int d_reg(int dim, int i) { return dim == 16 ? i % 4 : 4 * (i / 8) + i % 4; }

template <int N>
void read_c(Wave& w, const Inst& in, int block, float (*c)[N]) {
  int code = in.src[2].code, regs = N * N / 64;
  if (code < kVgpr) {
    float x = f32_of(scalar32(w, in, code));
    for (int i = 0; i < N; ++i)
      for (int j = 0; j < N; ++j) c[i][j] = x;
    return;
  }
  for (int i = 0; i < N; ++i) {
    const u32* row = &w.vgpr(code + block * regs + d_reg(N, i))[d_lane(N, i, 0)];
    for (int j = 0; j < N; ++j) c[i][j] = f32_of(row[j]);
  }
}
template <int N>
void write_d(Wave& w, const Inst& in, int block, const float (*d)[N]) {
  int regs = N * N / 64;
  for (int i = 0; i < N; ++i) {
    u32* row = &w.vgpr(in.dst.code + block * regs + d_reg(N, i))[d_lane(N, i, 0)];
    for (int j = 0; j < N; ++j) {
      u32 x = u32_of(d[i][j]);
      row[j] = is_nan(x) ? 0x7fc00000u : x;
    }
  }
}

// Values of the narrow formats, in the order of the f8f6f4 format codes.
struct Tables {
  float value[5][256];
  Tables() {
    const Narrow* formats[5] = {&kFp8, &kBf8, &kFp6, &kBf6, &kFp4};
    for (int f = 0; f < 5; ++f)
      for (u32 code = 0; code < 256; ++code)
        value[f][code] = code < (1u << formats[f]->width()) ? float(widen(*formats[f], code)) : 0.f;
  }
};
inline const Tables& tables() {
  static const Tables t;
  return t;
}

enum class Element { bf16, f16, f32, fp8, bf8, i8 };
// Element e of N neighbouring lanes.
template <int N, Element kind>
void elements(Wave& w, int code, int lane, int e, float* out) {
  constexpr bool small = kind == Element::bf16 || kind == Element::f16;
  const u32* x = &w.vgpr(code + (kind == Element::f32 ? e : small ? e / 2 : e / 4))[lane];
  int shift = kind == Element::f32 ? 0 : small ? 16 * (e & 1) : 8 * (e & 3);
  const float* table = tables().value[kind == Element::bf8];
  switch (kind) {
    case Element::bf16:
      for (int i = 0; i < N; ++i) out[i] = of_bf16((x[i] >> shift) & 0xffff);
      break;
    case Element::f16:
      for (int i = 0; i < N; ++i) out[i] = of_f16((x[i] >> shift) & 0xffff);
      break;
    case Element::f32:
      for (int i = 0; i < N; ++i) out[i] = f32_of(x[i]);
      break;
    case Element::i8:
      for (int i = 0; i < N; ++i) out[i] = float(i8(x[i] >> shift));
      break;
    default:
      for (int i = 0; i < N; ++i) out[i] = table[(x[i] >> shift) & 255];
  }
}

}  // namespace emu
