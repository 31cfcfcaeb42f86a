// Data of libc that distributions' static archives read at a fixed distance, as only executables can: the module's own.
//
// Debian compiles archives as code of executables. Within a shared library their references to libc's data do not
// link, unless the data is the library's own. These are read so, for no more than is said beside them.

extern "C" {

// glibc: not 0 where the process has had one thread only, so that reference counts need no atomics
// (<sys/single_threaded.h>). yaml-cpp's pointers read it; a process of Python may have threads.
[[gnu::visibility("hidden")]] char __libc_single_threaded = 0; // NOLINT: its name

// glibc: seconds west of UTC, and the names of the time zone (tzset(3)). ICU's clock reads them, which splitting text
// does not.
[[gnu::visibility("hidden")]] long __timezone = 0; // NOLINT: its name
[[gnu::visibility("hidden")]] const char* tzname[2] = {"UTC", "UTC"};
}
