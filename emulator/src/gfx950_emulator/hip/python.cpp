// SPDX-License-Identifier: MIT
// Finds the Python that decodes and runs the kernels: the one this process is, else one started
// here.
//
// Only five functions of Python's C API are needed, found at run time, so that one build of this
// library serves a Python process and a plain C++ program and links to neither.
#include <dlfcn.h>
#include <stdlib.h>

#include <mutex>

#include "python_config.h"  // written by hipcc.py: kLibPython, kPythonHome, kAttach
#include "runtime.h"

namespace gfx950 {
namespace {

template <class F>
F* function(const char* name) {
  return reinterpret_cast<F*>(dlsym(RTLD_DEFAULT, name));
}

bool find_python() {
  if (function<int()>("Py_IsInitialized")) return true;
  const char* chosen = getenv("GFX950_EMULATOR_LIBPYTHON");
  const char* path = chosen ? chosen : kLibPython;
  // NOTE: global, because Python's own extension modules look its symbols up.
  if (dlopen(path, RTLD_NOW | RTLD_GLOBAL)) return true;
  complain(std::string("no Python to run kernels with: ") + dlerror() +
           "; set GFX950_EMULATOR_LIBPYTHON to a libpython3.x.so, or run the program inside a "
           "Python process");
  return false;
}

// An embedded Python would look for its library beside whatever `python3` comes first in PATH.
void initialize() {
  const bool own_home = !getenv("PYTHONHOME");
  if (own_home) setenv("PYTHONHOME", kPythonHome, 1);
  function<void(int)>("Py_InitializeEx")(0);
  if (own_home) unsetenv("PYTHONHOME");
}

Interpreter table{};

bool start() {
  if (!find_python()) return false;
  const bool embedded = !function<int()>("Py_IsInitialized")();
  if (embedded) initialize();
  const int state = function<int()>("PyGILState_Ensure")();
  std::string code = kAttach;
  code += "attach(" + std::to_string(reinterpret_cast<uintptr_t>(&table));
  for (size_t bytes : {sizeof(Region), sizeof(Kernel), sizeof(Launch)})
    code += ", " + std::to_string(bytes);
  code += ")\n";
  const int failed = function<int(const char*)>("PyRun_SimpleString")(code.c_str());
  function<void(int)>("PyGILState_Release")(state);
  if (embedded) function<void*()>("PyEval_SaveThread")();
  if (failed) complain("the Python package gfx950_emulator could not be loaded, see above");
  return !failed;
}

}  // namespace

const Interpreter* interpreter() {
  static const bool ready = start();
  return ready ? &table : nullptr;
}

}  // namespace gfx950
