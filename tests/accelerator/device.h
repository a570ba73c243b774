// Tensors of the simulated device, for its collectives.
#pragma once

#include <ATen/ATen.h>

#include "engine.h"

namespace sim {

at::Tensor on_host(const at::Tensor& tensor);  // the same memory as a tensor of the CPU, which does not own it
Span span_of(const at::Tensor& tensor, bool is_write);
int stream_of(c10::Device device);  // the current one

}  // namespace sim
