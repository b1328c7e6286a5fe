// What glibc's headers of today call and glibc 2.28 did not have in its shared libraries. Hidden: each library has its own.
#include <sys/types.h>

struct stat64;

// stat and its kin were inline functions over these until 2.33. Version 1 is x86-64's only one.
extern int __xstat64(int version, const char* path, struct stat64* to);
extern int __lxstat64(int version, const char* path, struct stat64* to);
extern int __fxstat64(int version, int file, struct stat64* to);
extern int __fxstatat64(int version, int folder, const char* path, struct stat64* to, int flags);

int stat64(const char* path, struct stat64* to) { return __xstat64(1, path, to); }
int lstat64(const char* path, struct stat64* to) { return __lxstat64(1, path, to); }
int fstat64(int file, struct stat64* to) { return __fxstat64(1, file, to); }
int fstatat64(int folder, const char* path, struct stat64* to, int flags) { return __fxstatat64(1, folder, path, to, flags); }

// libstdc++'s headers count references without atomics while this is set; never is always right. Since 2.32.
char __libc_single_threaded = 0;
