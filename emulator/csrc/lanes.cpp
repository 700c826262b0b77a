// SPDX-License-Identifier: MIT
// DPP lane maps, SDWA byte selects, scalar operands.
#include "lanes.h"

namespace emu {

std::unordered_map<std::string, Handler>& handlers() {
  static std::unordered_map<std::string, Handler> table;
  return table;
}

int dpp_source(int ctrl, int i) {
  int row = i & ~15, in_row = i & 15;
  if (ctrl <= 0xff) return (i & ~3) | ((ctrl >> (2 * (i & 3))) & 3);
  if (ctrl >= 0x101 && ctrl <= 0x10f)
    return in_row + (ctrl & 15) < 16 ? i + (ctrl & 15) : -1;  // row_shl
  if (ctrl >= 0x111 && ctrl <= 0x11f)
    return in_row - (ctrl & 15) >= 0 ? i - (ctrl & 15) : -1;                       // row_shr
  if (ctrl >= 0x121 && ctrl <= 0x12f) return row | ((in_row - (ctrl & 15)) & 15);  // row_ror
  if (ctrl == 0x130) return i < 63 ? i + 1 : -1;                                   // wave_shl
  if (ctrl == 0x134) return (i + 1) & 63;                                          // wave_rol
  if (ctrl == 0x138) return i > 0 ? i - 1 : -1;                                    // wave_shr
  if (ctrl == 0x13c) return (i - 1) & 63;                                          // wave_ror
  if (ctrl == 0x140) return row | (15 - in_row);                                   // row_mirror
  if (ctrl == 0x141) return (i & ~7) | (7 - (i & 7));            // row_half_mirror
  if (ctrl == 0x142) return row ? row - 1 : -1;                  // row_bcast:15
  if (ctrl == 0x143) return i >= 32 ? 31 : -1;                   // row_bcast:31
  if (ctrl >= 0x150 && ctrl <= 0x15f) return row | (ctrl & 15);  // row_newbcast
  char text[64];
  std::snprintf(text, sizeof text, "dpp_ctrl 0x%x", ctrl);
  throw Fault("unimplemented", text);
}

void dpp_fetch(Wave& w, const Inst& in, const u32* from, u32* to) {
  u64 exec = w.exec(), valid = 0;
  for (int i = 0; i < kLanes; ++i) {
    int s = dpp_source(in.dpp, i);
    bool ok = s >= 0 && ((exec >> s) & 1);
    to[i] = ok ? from[s] : 0;
    valid |= u64(ok) << i;
  }
  w.dpp_valid = valid;
}

u32 sdwa_select(u32 x, u32 sel, bool sext) {
  if (sel < 4) {
    u32 b = (x >> (8 * sel)) & 0xff;
    return sext ? u32(i32(i8(b))) : b;
  }
  if (sel < 6) {
    u32 h = (x >> (16 * (sel - 4))) & 0xffff;
    return sext ? u32(i32(i16(h))) : h;
  }
  return x;
}

void sdwa_place(const Inst& in, const u32* old, u32* out) {
  u32 shift = in.dst_sel < 4 ? 8 * in.dst_sel : 16 * (in.dst_sel - 4);
  u32 width = in.dst_sel < 4 ? 8 : 16;
  u32 ones = ((1u << width) - 1) << shift;
  for (int i = 0; i < kLanes; ++i) {
    u32 placed = (out[i] << shift) & ones;
    if (in.dst_unused == 2) {
      placed |= old[i] & ~ones;
    } else if (in.dst_unused == 1) {  // sign extends upwards, zeros below
      u32 above = shift + width < 32 ? ~0u << (shift + width) : 0u;
      if (placed >> (shift + width - 1) & 1) placed |= above;
    }
    out[i] = placed;
  }
}

u32 scalar32(Wave& w, const Inst& in, int code) {
  if (code < 128) return w.s[code];
  if (code <= 192) return u32(code - 128);
  if (code <= 208) return u32(192 - code);
  if (code >= 240 && code <= 248) return u32_of(inline_float(code));
  switch (code) {
    case kLiteral: return in.literal;
    case kScc: return w.scc;
    case kVccz: return w.vcc() == 0;
    case kExecz: return w.exec() == 0;
    case kSharedBase: return 0;
    case kSharedLimit: return 0xffffffffu;
    case kPrivateBase: return 0;
    case kPrivateLimit: return 0xffffffffu;
  }
  throw Fault("unimplemented", "scalar operand code " + std::to_string(code));
}

u64 scalar64(Wave& w, const Inst& in, int code, bool is_float) {
  if (code < 127) return w.pair(code);
  if (code >= 128 && code <= 192) return u64(code - 128);
  if (code <= 208 && code > 192) return u64(i64(192 - code));
  if (code >= 240 && code <= 248) {
    if (code == 248) return 0x3fc45f306dc9c882ull;  // 1/(2 pi)
    return bits<u64>(double(inline_float(code)));
  }
  switch (code) {
    case kLiteral: return is_float ? u64(in.literal) << 32 : u64(in.literal);
    case kSharedBase: return kSharedAperture;
    case kPrivateBase: return kPrivateAperture;
    case kVccz:
    case kExecz:
    case kScc: return scalar32(w, in, code);
  }
  throw Fault("unimplemented", "64-bit scalar operand code " + std::to_string(code));
}

}  // namespace emu
