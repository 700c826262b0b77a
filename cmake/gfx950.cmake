# SPDX-License-Identifier: MIT
# Any clang >= 20 with the amdgcn target and its lld will do. The default is the one inside the PyPI
# package ziglang, because pip alone can install it; -DROTQUANT_CLANG=clang++-22
# -DROTQUANT_LLD=ld.lld-22 takes others.
find_package(Python3 REQUIRED COMPONENTS Interpreter)
set(ROTQUANT_CLANG "${Python3_EXECUTABLE};-m;ziglang;clang" CACHE STRING "clang with the amdgcn target")
set(ROTQUANT_LLD "${Python3_EXECUTABLE};-m;ziglang;ld.lld" CACHE STRING "lld of the same version")

# As hipcc compiles them for the package, less the headers and libraries of ROCm.
set(ROTQUANT_GFX950_FLAGS
  -x hip --offload-arch=gfx950 --cuda-device-only --no-gpu-bundle-output -nogpulib -nogpuinc
  -O3 -std=c++20 -ffp-contract=off -Wall -Wextra -Werror -DRQ_DEVICE_ONLY)

# Target `name`: for every .hip file with kernels (<op>/kernel.hip and <op>/inst/*.hip; the others are
# host code), build/<stem>.s (the disassembly: what the code
# object is assembled from, with the compiler's register counts) and build/<stem>.co (code object).
function(add_gfx950_code_objects name source_dir)
  file(GLOB_RECURSE sources CONFIGURE_DEPENDS 
    "${source_dir}/hip/*/kernel.hip" "${source_dir}/hip/*/inst/*.hip")
  file(GLOB_RECURSE headers CONFIGURE_DEPENDS "${source_dir}/core/*" "${source_dir}/hip/*.h" "${source_dir}/hip/*.def")
  set(outputs)
  foreach(source IN LISTS sources)
    file(RELATIVE_PATH stem "${source_dir}/hip" "${source}")
    string(REGEX REPLACE "\\.hip$" "" stem "${stem}")
    string(REPLACE "/" "-" stem "${stem}")
    set(out "${CMAKE_BINARY_DIR}/${stem}")
    add_custom_command(
      OUTPUT "${out}.s"
      COMMAND ${ROTQUANT_CLANG} ${ROTQUANT_GFX950_FLAGS} "-I${source_dir}" -S -o "${out}.s" "${source}"
      DEPENDS "${source}" ${headers}
      COMMENT "gfx950 ${stem}.s" VERBATIM COMMAND_EXPAND_LISTS)
    add_custom_command(
      OUTPUT "${out}.co"
      COMMAND ${ROTQUANT_CLANG} -target amdgcn-amd-amdhsa -mcpu=gfx950 -c -o "${out}.o" "${out}.s"
      COMMAND ${ROTQUANT_LLD} -shared -o "${out}.co" "${out}.o"
      DEPENDS "${out}.s"
      COMMENT "gfx950 ${stem}.co" VERBATIM COMMAND_EXPAND_LISTS)
    list(APPEND outputs "${out}.co")
  endforeach()
  add_custom_target(${name} DEPENDS ${outputs})
endfunction()
