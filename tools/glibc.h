// Included before the kernel that a wheel carries. Since 2.29 glibc has these
// two a second time, without a way to set errno that the kernel never asks
// about: it asks for the first, which every glibc on x86-64 has.
#include <features.h>
#ifdef __GLIBC__
__asm__(".symver exp, exp@GLIBC_2.2.5\n.symver pow, pow@GLIBC_2.2.5");
#endif
