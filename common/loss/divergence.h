// Divergences between the next-token distributions p of a student, which learns, and q of a
// teacher.
#ifndef TANDEM_COMMON_LOSS_DIVERGENCE_H_
#define TANDEM_COMMON_LOSS_DIVERGENCE_H_

namespace tandem::loss {

enum class DivergenceKind {
  kReverse,  // KL(p || q)
  kForward,  // KL(q || p)
  // beta KL(q || m) + (1 - beta) KL(p || m) with m = beta q + (1 - beta) p (arXiv 2306.13649)
  kJensenShannon,
};

struct Divergence {
  DivergenceKind kind = DivergenceKind::kReverse;
  double beta = 0.5;  // of kJensenShannon, in (0, 1)

  bool operator==(const Divergence&) const = default;
};

}  // namespace tandem::loss

#endif  // TANDEM_COMMON_LOSS_DIVERGENCE_H_
