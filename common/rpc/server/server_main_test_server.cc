// tandem-rollout-server without a model, for server_main_test: loading takes LOAD_MS, a GetVersion
// call says so and takes CALL_MS, LOAD_FAILS makes loading fail, MEMORY_BYTES is what it needs.
// With SAVE_MS there is unsaved state, and Stop says so and saves it in that time; STOP_MS is the
// time of a Stop that saves nothing. SAVE_FAILS makes saving fail; UNSAVED is state that Stop does
// not save. Before main it takes START_MS, as large libraries do, and says so.
#include <unistd.h>

#include <cstdlib>
#include <iostream>
#include <memory>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/base/errors/error.h"
#include "common/rpc/testing/fake_weight_service.h"

namespace {

absl::Duration FromEnvironment(const char* name) {
  const char* text = std::getenv(name);
  return absl::Milliseconds(text == nullptr ? 0 : std::atoi(text));
}

// Like the constructors of a shared library.
[[gnu::constructor]] void TakeTimeToStart() {
  const char* text = std::getenv("START_MS");
  if (text == nullptr) return;
  (void)!write(STDOUT_FILENO, "starting\n", 9);
  usleep(static_cast<useconds_t>(std::atoi(text)) * 1000);
}

}  // namespace

int main(int argc, char** argv) {
  using tandem::weights::v1::GetVersionRequest;
  using tandem::weights::v1::GetVersionResponse;
  return tandem::rpc::ServerMain<tandem::config::v1::RolloutServerConfig>(
      argc, argv, "rollout",
      [](const auto&, tandem::rpc::ServerRuntime& runtime) {
        auto app = std::make_unique<tandem::rpc::FakeApp>(
            runtime,
            [](const GetVersionRequest&,
               const tandem::CallScope&) -> absl::StatusOr<GetVersionResponse> {
              std::cout << "call started" << std::endl;
              absl::SleepFor(FromEnvironment("CALL_MS"));
              return GetVersionResponse();
            });
        app->load_ = [] {
          absl::SleepFor(FromEnvironment("LOAD_MS"));
          return std::getenv("LOAD_FAILS") == nullptr ? absl::OkStatus()
                                                      : absl::NotFoundError("no such model");
        };
        app->saves_ = std::getenv("SAVE_MS") != nullptr;
        app->unsaved_ = app->saves_ || std::getenv("UNSAVED") != nullptr;
        app->stop_ = [app = app.get()] {
          std::cout << "stopping" << std::endl;
          absl::SleepFor(FromEnvironment("STOP_MS"));
          if (!app->unsaved_ || !app->saves_) return;
          absl::SleepFor(FromEnvironment("SAVE_MS"));
          if (std::getenv("SAVE_FAILS") != nullptr) return;
          app->unsaved_ = false;
          std::cout << "saved" << std::endl;
        };
        return app;
      },
      {.measure_devices = [](const auto& config, const std::optional<int64_t>& assumed,
                             tandem::FreeMemory& free) -> absl::Status {
         if (config.compute().device() == "cpu") return absl::OkStatus();
         if (assumed.has_value()) {
           free.devices[0] = assumed;
           return absl::OkStatus();
         }
         const char* bytes = std::getenv("FREE_GPU_BYTES");
         if (bytes == nullptr) return tandem::InvalidField("compute.device", "no GPU");
         free.devices[0] = std::atoll(bytes);
         return absl::OkStatus();
       },
       .plan = [](const auto& config,
                  const tandem::FreeMemory& free) -> absl::StatusOr<tandem::MemoryPlan> {
         const char* const given = std::getenv("MEMORY_BYTES");
         const int64_t bytes = given == nullptr ? 1'000'000 : std::atoll(given);
         const bool on_host = config.compute().device() == "cpu";
         return tandem::MemoryPlan{
             {{.name = "weights",
               .bytes = bytes,
               .on_host = on_host,
               .note = on_host ? "" : absl::StrCat("a GPU has ", free.devices[0].value_or(0))}}};
       }});
}
