// Linked into every server: SIGTERM and SIGINT wait for RunServer from before the constructors of
// the shared libraries on, which take a tenth of a second. Without it a server that is stopped as
// it starts ends by the signal instead of with 0; what is left is the loader's time, some 20 ms.
#include <signal.h>

namespace {

void HoldSignals(int, char**, char**) {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGTERM);
  sigaddset(&set, SIGINT);
  sigprocmask(SIG_BLOCK, &set, nullptr);
}

[[gnu::section(".preinit_array"), gnu::used]] void (*const kHoldSignals)(int, char**,
                                                                         char**) = HoldSignals;

}  // namespace
