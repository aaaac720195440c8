#include "common/ranks/deadline.h"

#include <future>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "common/base/steady_time.h"
#include "common/tensor/aten/catch_torch_errors.h"

namespace tandem::ranks {

absl::Status RunUntil(SteadyTime deadline, absl::string_view what,
                      std::function<absl::Status()> body) {
  auto task = std::make_shared<std::packaged_task<absl::Status()>>(
      [what = std::string(what), body = std::move(body)] { return CatchTorchErrors(what, body); });
  std::future<absl::Status> result = task->get_future();
  std::thread thread([task] { (*task)(); });
  const auto left = absl::ToChronoMilliseconds(deadline - SteadyTime::Now());
  if (result.wait_for(left) != std::future_status::ready) {
    thread.detach();
    return absl::DeadlineExceededError(
        "a process accepted the connection but did not answer in time: it may be suspended, or "
        "another program may be listening there");
  }
  thread.join();
  return result.get();
}

}  // namespace tandem::ranks
