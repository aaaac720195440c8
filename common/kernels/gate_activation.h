// The activation of a gated feed-forward network.
#ifndef TANDEM_COMMON_KERNELS_GATE_ACTIVATION_H_
#define TANDEM_COMMON_KERNELS_GATE_ACTIVATION_H_

namespace tandem::kernels {

// The activation of a gate g.
enum class GateActivation {
  kSilu,  // g sigmoid(g)
  // GELU in the approximation 0.5 g (1 + tanh(z)) = g sigmoid(2 z), z = sqrt(2 / pi) (g + 0.044715
  // g^3) (https://arxiv.org/abs/1606.08415).
  kGeluTanh,
};

}  // namespace tandem::kernels

#endif  // TANDEM_COMMON_KERNELS_GATE_ACTIVATION_H_
