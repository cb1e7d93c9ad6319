// The macros that kernel-builder's own file of this name has, as far as the ops use them.
#pragma once

#include <Python.h>

#define STABLE_TORCH_LIBRARY_EXPAND(name, module) STABLE_TORCH_LIBRARY(name, module)
#define STABLE_TORCH_LIBRARY_IMPL_EXPAND(name, device, module) STABLE_TORCH_LIBRARY_IMPL(name, device, module)
#define HUB_INIT(name) PyInit_##name
#define HUB_NAME(name) #name
#define REGISTER_EXTENSION(name)                                                                            \
  PyMODINIT_FUNC HUB_INIT_OF(name)() {                                                                      \
    static PyModuleDef module = {                                                                           \
        PyModuleDef_HEAD_INIT, HUB_NAME_OF(name), nullptr, 0, nullptr, nullptr, nullptr, nullptr, nullptr}; \
    return PyModule_Create(&module);                                                                        \
  }
#define HUB_INIT_OF(name) HUB_INIT(name)
#define HUB_NAME_OF(name) HUB_NAME(name)
