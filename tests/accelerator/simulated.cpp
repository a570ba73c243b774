// The whole extension as one translation unit: most of the time goes into torch's headers, which are so read once.
#include "engine.cpp"
#include "collectives.cpp"
#include "device.cpp"
