// Nothing: the program's part of the precompiled headers in CMakeLists.txt.
