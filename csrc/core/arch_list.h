// SPDX-License-Identifier: MIT
// Is the GPU one that this build has code for? Asked before the first launch on a device.
#pragma once

#include <stdexcept>
#include <string>

namespace rotquant {

// `compiled`: architectures separated by ';' or ' ', as in PYTORCH_ROCM_ARCH. `running`: what the
// driver reports, feature suffixes included ("gfx950:sramecc+:xnack-").
inline void require_arch(const std::string& compiled, const std::string& running) {
  const std::string name = running.substr(0, running.find(':'));
  size_t begin = 0;
  while (begin <= compiled.size()) {
    size_t end = compiled.find_first_of("; ", begin);
    if (end == std::string::npos) end = compiled.size();
    const std::string entry = compiled.substr(begin, end - begin);
    if (!entry.empty() && entry.substr(0, entry.find(':')) == name) return;
    begin = end + 1;
  }
  throw std::runtime_error(
      "rotquant_hip was compiled for " + (compiled.empty() ? "no GPU" : compiled) +
      ", but the current device is " + running + "; rebuild with PYTORCH_ROCM_ARCH=" + name +
      " if that architecture is supported");
}

}  // namespace rotquant
