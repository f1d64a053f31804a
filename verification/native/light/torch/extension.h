// What kernels and their bindings use of torch/extension.h: tensors, operators, checks, pybind11.
// The real one also brings torch::nn, torch::optim, torch::data and their like, which takes as long
// to compile as all the rest. A build that misses them is repeated with the real one.
#pragma once

#include <torch/types.h>

#if !defined(__CUDACC__) || defined(BINDINGS_IN_DEVICE_CODE)
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <iostream>
#include <limits>
#include <map>
#include <memory>
#include <numeric>
#include <sstream>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>
