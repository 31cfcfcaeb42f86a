// Stops one thread of another process for good, as an endless loop or a lost device would, while its other threads
// live.
#pragma once

#include <sys/types.h>

#include <string>

namespace moe::test {

// The thread of the process with this name (/proc/PID/task/*/comm), 0 without one.
pid_t thread_named(pid_t process, const std::string& name);

// Stops the thread; false where the system does not allow it. The caller is its tracer from then on and must let it end
// by await_end().
bool stop_thread(pid_t thread);
// Waits until the thread has ended, which happens when its process does; false after so many seconds, when the process
// is killed.
bool await_end(pid_t process, pid_t thread, double seconds);

} // namespace moe::test
