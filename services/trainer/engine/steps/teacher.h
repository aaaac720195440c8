// A teacher: a frozen model whose distribution the model in training is drawn towards by a KL.
#ifndef TANDEM_SERVICES_TRAINER_ENGINE_STEPS_TEACHER_H_
#define TANDEM_SERVICES_TRAINER_ENGINE_STEPS_TEACHER_H_

#include <cstddef>

#include "common/coauthoring/author.h"
#include "common/coauthoring/trajectory.h"
#include "services/trainer/engine/steps/objective.h"

namespace tandem {
class Model;
}  // namespace tandem

namespace tandem::trainer {

struct Teacher {
  // Shares the vocabulary of the model in training. Null: only kForwardSampled is possible, which
  // reads what the rollout recorded for the author of a token: its author must be the teacher.
  const Model* model = nullptr;
  // Whether response token `t` of a trajectory is one of the teacher's rows.
  bool (*teaches)(const Trajectory& trajectory, size_t t) = nullptr;
  TeacherDirection direction = TeacherDirection::kReverse;
  double coefficient = 0;  // of the mean KL over the teacher's rows; 0: nothing is taught

  bool is_on() const { return coefficient > 0; }
};

// Returns the only teacher of an objective: the junior, on the tokens that it wrote, with the
// coefficient lambda_jun of arXiv 2606.28166. `junior` may be null, as for code that reads no
// model.
inline Teacher TeacherOf(const PolicyObjective& objective, const Model* junior = nullptr) {
  return {.model = junior,
          .teaches = [](const Trajectory& trajectory,
                        size_t t) { return trajectory.authorship_mask[t] == Author::kJunior; },
          .direction = objective.junior_kl_kind,
          .coefficient = objective.junior_kl_coefficient};
}

}  // namespace tandem::trainer

#endif  // TANDEM_SERVICES_TRAINER_ENGINE_STEPS_TEACHER_H_
