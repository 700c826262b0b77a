// SPDX-License-Identifier: MIT
// Sparse matrix instructions: A holds two of every four consecutive k and their 2-bit positions;
// B, C and D are dense, and C is D.
//
// Lane dim*g + i holds n consecutive non-zeros of row i, those of k = 2*n*g .. 2*n*(g+1)-1: element
// e belongs to the four from 2*n*g + 4*(e/2) on. Its position is bits 2*e+1:2*e of the lane's
// index, which is 2*n bits wide. The index register holds 16/n of them; ABID picks one if CBSZ is
// 0, else it is the first (ASSUMED for the shapes that gfx950 adds). B is stored as chunks of 16
// bytes a lane: chunk c of lane dim*g + j holds the k from K/chunks*c + (16 bytes)*g on.
#include "matrix.h"

namespace emu {
namespace {

template <int N, int K, Element ka, Element kb>
void sparse(Wave& w, const Inst& in) {
  no_modifiers(in);
  if (in.blgp) throw Fault("unimplemented", "blgp on a sparse matrix instruction");
  constexpr int groups = 64 / N, nonzero = K / 2 / groups, dense = 2 * nonzero;
  constexpr int chunk = ka == Element::f16 || ka == Element::bf16 ? 8 : 16, chunks = dense / chunk;
  const int set = in.cbsz ? 0 : int(in.abid);
  if (set >= 16 / nonzero)
    throw Fault("unimplemented", "abid beyond the index sets of a sparse matrix instruction");
  constexpr bool integer = ka == Element::i8;
  alignas(64) float b[128][N], sum[N][N], a[N];
  for (int g = 0; g < groups; ++g)
    for (int e = 0; e < dense; ++e)
      elements<N, kb>(w, in.src[1].code, N * g, e,
                      b[K / chunks * (e / chunk) + chunk * g + e % chunk]);
  // ASSUMED, as for the dense forms: products exact, added in float32 in the order of A's elements.
  // The sums of int8 products are exact in float32.
  for (int i = 0; i < N; ++i)
    for (int j = 0; j < N; ++j)
      sum[i][j] = integer ? 0.f : f32_of(w.vgpr(in.dst.code + d_reg(N, i))[d_lane(N, i, j)]);
  for (int g = 0; g < groups; ++g)
    for (int e = 0; e < nonzero; ++e) {
      elements<N, ka>(w, in.src[0].code, N * g, e, a);
      const u32* index = &w.vgpr(in.src[2].code)[N * g];
      for (int i = 0; i < N; ++i) {
        int position = int(index[i] >> (2 * (nonzero * set + e))) & 3;
        const float* row = b[2 * nonzero * g + 4 * (e / 2) + position];
        for (int j = 0; j < N; ++j) sum[i][j] += a[i] * row[j];
      }
    }
  if (!integer) return write_d<N>(w, in, 0, sum);
  for (int i = 0; i < N; ++i)
    for (int j = 0; j < N; ++j)
      w.vgpr(in.dst.code + d_reg(N, i))[d_lane(N, i, j)] += u32(i32(sum[i][j]));
}
#define SPARSE(name, N, K, ka, kb) EMU_HANDLER(name, (sparse<N, K, Element::ka, Element::kb>))
SPARSE("v_smfmac_f32_16x16x32_f16", 16, 32, f16, f16)
SPARSE("v_smfmac_f32_16x16x32_bf16", 16, 32, bf16, bf16)
SPARSE("v_smfmac_f32_32x32x16_f16", 32, 16, f16, f16)
SPARSE("v_smfmac_f32_32x32x16_bf16", 32, 16, bf16, bf16)
SPARSE("v_smfmac_f32_16x16x64_f16", 16, 64, f16, f16)
SPARSE("v_smfmac_f32_16x16x64_bf16", 16, 64, bf16, bf16)
SPARSE("v_smfmac_f32_32x32x32_f16", 32, 32, f16, f16)
SPARSE("v_smfmac_f32_32x32x32_bf16", 32, 32, bf16, bf16)
SPARSE("v_smfmac_i32_16x16x64_i8", 16, 64, i8, i8)
SPARSE("v_smfmac_f32_16x16x64_fp8_fp8", 16, 64, fp8, fp8)
SPARSE("v_smfmac_f32_16x16x64_fp8_bf8", 16, 64, fp8, bf8)
SPARSE("v_smfmac_f32_16x16x64_bf8_fp8", 16, 64, bf8, fp8)
SPARSE("v_smfmac_f32_16x16x64_bf8_bf8", 16, 64, bf8, bf8)
SPARSE("v_smfmac_i32_32x32x32_i8", 32, 32, i8, i8)
SPARSE("v_smfmac_f32_32x32x32_fp8_fp8", 32, 32, fp8, fp8)
SPARSE("v_smfmac_f32_32x32x32_fp8_bf8", 32, 32, fp8, bf8)
SPARSE("v_smfmac_f32_32x32x32_bf8_fp8", 32, 32, bf8, fp8)
SPARSE("v_smfmac_f32_32x32x32_bf8_bf8", 32, 32, bf8, bf8)
SPARSE("v_smfmac_i32_16x16x128_i8", 16, 128, i8, i8)
SPARSE("v_smfmac_f32_16x16x128_fp8_fp8", 16, 128, fp8, fp8)
SPARSE("v_smfmac_f32_16x16x128_fp8_bf8", 16, 128, fp8, bf8)
SPARSE("v_smfmac_f32_16x16x128_bf8_fp8", 16, 128, bf8, fp8)
SPARSE("v_smfmac_f32_16x16x128_bf8_bf8", 16, 128, bf8, bf8)
SPARSE("v_smfmac_i32_32x32x64_i8", 32, 64, i8, i8)
SPARSE("v_smfmac_f32_32x32x64_fp8_fp8", 32, 64, fp8, fp8)
SPARSE("v_smfmac_f32_32x32x64_fp8_bf8", 32, 64, fp8, bf8)
SPARSE("v_smfmac_f32_32x32x64_bf8_fp8", 32, 64, bf8, fp8)
SPARSE("v_smfmac_f32_32x32x64_bf8_bf8", 32, 64, bf8, bf8)

}  // namespace
}  // namespace emu
