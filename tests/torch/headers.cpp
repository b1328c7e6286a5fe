// Empty: carries the precompiled headers of CMakeLists.txt.
