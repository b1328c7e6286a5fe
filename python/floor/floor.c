// Functions used by current glibc headers and missing in the shared libraries of glibc 2.28.
// Hidden: each library has its own copy.
#include <sys/types.h>

struct stat64;

// stat and its relatives were inline wrappers of these functions until 2.33. Version 1 is the only
// one on x86-64.
extern int __xstat64(int version, const char* path, struct stat64* to);
extern int __lxstat64(int version, const char* path, struct stat64* to);
extern int __fxstat64(int version, int file, struct stat64* to);
extern int __fxstatat64(int version, int folder, const char* path, struct stat64* to, int flags);

int stat64(const char* path, struct stat64* to) { return __xstat64(1, path, to); }
int lstat64(const char* path, struct stat64* to) { return __lxstat64(1, path, to); }
int fstat64(int file, struct stat64* to) { return __fxstat64(1, file, to); }
int fstatat64(int folder, const char* path, struct stat64* to, int flags) {
    return __fxstatat64(1, folder, path, to, flags);
}

// While set, libstdc++'s headers count references without atomics; 0 is always correct. Since 2.32.
char __libc_single_threaded = 0;
