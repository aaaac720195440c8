// The priority of threads that pack new weights beside those that serve.
#ifndef TANDEM_COMMON_WEIGHTS_PACKING_THREAD_H_
#define TANDEM_COMMON_WEIGHTS_PACKING_THREAD_H_

#include <pthread.h>
#include <sys/resource.h>
#include <unistd.h>

namespace tandem {

// Gives the calling thread its name and a low priority, from now on: it yields to those that serve.
// Where all cores are busy it gets about a quarter of one, and on an idle machine a whole one.
inline void BecomePackingThread() {
  constexpr int kNiceness = 6;
  pthread_setname_np(pthread_self(), "weights");
  setpriority(PRIO_PROCESS, static_cast<id_t>(gettid()), kNiceness);
}

}  // namespace tandem

#endif  // TANDEM_COMMON_WEIGHTS_PACKING_THREAD_H_
