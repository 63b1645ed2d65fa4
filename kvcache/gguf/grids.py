"""The grids of ggml's types of 2 and 3 bits: which values groups of 8 or 4 weights have, by their number.

A grid has a row for each number, of places in the type's list of magnitudes. They are packed as ggml's own package for
Python packs them, here in base 85: 4 places in a byte for IQ2, 2 for IQ3, the first in the lowest bits.
"""

from __future__ import annotations

import base64

import numpy as np
from numpy.typing import NDArray

__all__ = ["GRIDS"]

_PACKED = {
    "IQ2_XXS": (
        "000621po*D3IGuR6aXLqA^<1=DgZ$ML;z3#SO8%FWB`Bwf&hvDq5uH_1OX5M6#+m2gaMcV00II6A_9T}0R#jD5CkCvBm_VNLIg+zU<82#gan"
        "WTqyzv30tE;KAO%JRX$61<kp&3`5C%X7ga)Jr00;#L2nZAiC<s9aL<mp_QV56$1PMS10tyrg0T2Wb5D*~{KoDRMgb<Jrl@I_C2oWF=P!U=Yf"
        "Dt4TMG^oM2oxX`B@{^%fD{-NVif=u78U^*1Q-w)Kp24-02u`tpczpb03ZS&3Lr!vVIY7Yf*>g&NFe|s0wMt<1SAk7KqOWq03|^sWF?R$2q+*"
        "Zlqf_h0YC&m5I`6}AwVQRKtM=9RzP4tfk1>nkU#)IAVFb4fI)>p0YVT$NJ3UZXhHx)2t*)6fJB)@5=A6M07d~w1V|7_KuASM07+O$VM&5XMM"
        "{uL08j`}5l|UWAW(o%h)@JkLQ$kqky4OUl2i&+0ajF209X-N8CYakKv@V{1Yi(gKwxNK0AW>O7-C>z0AvMZ5M>f&gk?f#0DuC33V=a?f`9~p"
        "7=b{65rP4P1cVTT6@);9V1xjLMun7x35Gz1V1@#S1c?!f1dtGrB#=Omp^z4lfRRO#0F)w>M3hmLftVnf0-#W!g`f$c0HPSAP^bi{"
    ),
    "IQ2_XS": (
        "000621po*D3IGuR6aW?g82}&vA^;@-C;&kKL;ywrNdQm)QUFx|SO8%FWB`Bwf&hg8hyalQlmM9kpa1~@1OWyC2>}oR5&;zf7y%jqAps--Kmk"
        "GlMFB_wQ2|r|U;$_WfdPa8kO2S!0s;jB2m%oT6apXuK>|bqPy$r~fC7pF0R#jD1_TKN5Cjqg6$BUrAp|4@Km<YrMFdC$Q3O;3Rs>)KfdqsEk"
        "OTk)0tE#H2n7)Z6a^p!K?OtwPz7NHfCT{t1O^ZWCI&zTLI#8e00;sI1qcWT3J4Jh6bK*)B?v(XL<mp_SO|a!pa`l60SN>N5D7pDfeDET016-"
        "qC<>Mepb7yH1P}%g2@ntv5)c&-7!V;4BoIIlLJ&m|NDxsFR1jbgY7l`Cgb<Jr01*Na1rZ1l5fKy-AQ3?kL=jLCfDx1tmJtCG1QG@k5E4KVU="
        "jcn0u%)l2ow<%6civ7K@>z3Nfb~NWE6lD0Tl!l5EVcb02UM$NfrSZ1Q-w)5*R=jR2YUB02u`tW*Jc$sTu$v0w4t-2p|d|5g-&GARs{?L?BQg"
        "fFPhC0U-n-5FtPzNFik*03sqHfFh_O0VD(@5F{xiKqLSqK_yZpnI!=x8YZSD04NA33Me2bRVaukq9|x7kSPc%AS!|?h$@OI0YC&m20#fw5I_"
        "<@6+jq3AwVQRKtMu3ML<YEN<dLSR6t-rWk7*Igg}r$06_vl1wjZw5kV9|AVEPvL_ttNfI)>pqCo*d1VRu(5<)3LKtcdS0z?Hw2t*M?6hs+BA"
        "Vfh#L_|<TfJBr;0YwBw5Je<KKt-BG07eQ%L`G0X0Z0T$5J*5sMMzXgVn_f<5lKWzP)TV?1WEu<0#F4|2v8AF6i^^gC{RIAL{LyrfKUNZ1W^!"
        "C6;VJ@LQw!xL{h3!0aOH35L6*lKvZB<fmESX096Q8fK`Z9Ay#Nsp;iD`6j(u6P*|B*8d*SDLRp1c0bm4R5MV%HRA6FYhG3~+0AVCzN@9{?0A"
        "v<q5M@ARMP;OA0cdJyC20m~RBB>s0DuC31%L>E5r7ncAb=`>L4ZVnP=J7df`F)is(=B31c3&D5P?8}QGr>30D>TbfP#X8pn|A^0fYpE5QGwh"
        "6@);9V1$W;0EI+_rG*%VYK8!a2#6(!T8My%f{3Vy28kkyfQpEUmWrr~0gwcc5RgESR*-~{0Ffe*WRX^qiIM=61(ZaTP?T7dDV30wl9fT0QJA"
        "KfNtqRzV447+0-y+>3ZNjMDxjdCQK4C(rlA0$0-^|_Dx!d*prSyem84~+n5GJ-AgCg!D5#*QsHg;~gsFz9D5@%|k*cby"
    ),
    "IQ2_S": (
        "000621po*D3IGuR6aW?g82}&vA^;@-C;&kKL;ywrNdQm)QUFx|SO8%FWB_IWX#ju#f&hg8hyalQlmMUrr2wh`0RaR71_22H5CIYa6#*ClAps"
        "--KmkGlMFB_wQ2|r|RsmT7U;$+TXaRu%gaMENk^z+gp#h`;00II61p){H5dstfAOb1^K>|bqMgmC!Py$r~fC7aAiUO1Zq5=T~1Ox^I2?P)X5"
        "(E_l7z7~%Bm^b|DFi?SLIgzwNCZj*Q3O;3Rs>lDU<6_WWdwl)gan2Ji3E@Yl?0dsp#-D^00jaC1qBEN3I!1b6a^Lq83iB(B?Tx2K?OtwMg>U"
        ")Pz6#2RRvfDVFhFbfCYjDg$0NOkp+|mpalU21O^5M2?h`b6$U^CMFvO)Q3g~7U<QE(ga(iX00;sI1qcWT5eO6r76=&#AP6N0DhNRcL<mL*Ne"
        "EB~QV3NDSO{SVWC(x=g$R@gst5rI1PKrc5(yOv7zrT>KnX<&NC{C1R0&`SfeDZa016Qb6bd2=C<-bHPzsp}0T2Wb1`r7l5D*d&6%ZH@ArK@G"
        "CJ;anLJ&m|NDxsFR1j7WSrA|lVi08zXb^!Agb;=hkPwv+m=K{5q!0iR0ucof2oVYq5fKy-77-Z{AQ2)FB@rkQK@mg|MiEI7P!UoQRS{SbVG("
        "2zfDwWbg%OAmkr9*;0TKif2@((z6%rv5BoaUpMG{dGR1$#_gc6Vv02Bfg1r!Jr5fl^@78Ds2AQUAOC=@{yL=;98Nfb~NQWRAbSQKFtWE6lDf"
        ")s@mh!l|&loX&80Tl!l1{Dbv5ET*?6%`m2Ar&MQKovq2MHNUDQ594bU=@KCgcXn#02T!n2o@0*6c!*BK^8<7P!@m|sulql1Q-Sw2^bI<6&M&"
        "8As9dyLKsCDNElHVR2X0wff$4s02u-q1sMn#5g8O2AQ?d!L>W*SX&Is!1R4+;KpIvW03ZS&1t16@5g-&G79bfQARr|mDj-21L?BQgQXo|zWF"
        "UYbiXfCAsvrR&1R)S15+M~KAt68^LLo&VQ6W?zU?G7agdvb203r$^A|favDk4N8P$GyTiXx~Y0VD(@1|$h25F`~O7$hMiBqTs2LL@~bNF-4t"
        "R3u;|fh2?^kR$*l1tkb25hWBQASFR1L?uuqW+i|n0VV_{5GFt-StbA|1t<|H6evL`L?}=wiYTfm0VxD25Gj=@3MwKhWGaX%iYfs>1V9Er2|y"
        "4)5<nF|7(g08AwVQRCO|+yLO?}8NI*(JQ9x8cRzO)mU_fF(Wk7*Igg}r$l|Yz4p+KZS06_vl1wjZw5kV9|7C{+7AVDHQB|$+!L_tPDNkLFSQ"
        "bAQgSV3VyWI=#If<c8rh(VD-ltG|D0YU^q5JD0{6+#$7Btk$!MM6kIQ9@KgU_yaHghBvB0z?Hw2t*1*5kwS37DO3DAVeZWB}6DhK}1AEMnp+"
        "OP()HhRYX`sVMJs^fJA~sg+z!%kwlb4phN*h1Vsi#2}KY^5=9k77)2pPBt<|)LPbSINJUXaR7GG#YDIxXghh}=07e2v1x5%)5k?e7AVxt(L`"
        "G0XfJUW80Z0T$2}lq~5=a$D7)T*VBuGF=LP$kONJvpgR7hY*gh-G`07(K#1xW}=5lIwDAW1<<L`hIdfJv4~0ZIf)5K2Hw08j!@1yBf35l|FR"
        "7El>bAW$MuB~U0(K~O|cMo>vmP*74(RZv(^VNhgHfKY-^g;0o4kx-OS0Z{}|22lx75K$6Q6;T*bAyFhzKv6<bMNvpmQBhP;U{Qflgi(-D08#"
        "}~2vQMJ6jC5kK~h9gP*Q19fKmZe1XKo82~-eN5>ypb7*rutBve3DLR3XmNK{c&R8(M8fmDQ4kW>Iw0#yZ72vreP6jdNqK~+RmP*s3c0agT75"
        "LPBuKvn=)0$2rD2v`wV6j&fwL0CjsP*_@6fLH-p1X&PSKv@7<8Cr!}s9FJF1YibW5MUBu6<`=(Az&n6Kww2+NMKQ5RA69WgkX?h0AT`Q1z`w"
        "b5n&WzAYnmaL}5^2fMJ<o1Y!_kKw?&6p<)1J1!M?h5o8o(AY?&gL}XB8fMfw>1Z5CqKxIm0Xl0UR0A`eC0cZqh5NKs+m}mfLDrrJ$p=tnt0)"
        "Pd82!IiQ6o46kAb=%+L4ZVnP=Hc^Re)H4VSs>ug@BQOlz;(&1c3>G5P=eb6@eImA%P@;K!HMmMS)0xQGrx}fq{g9kb$Xz0D=XA3W5=W6oNs5"
        "M1oL)0fYpE280QO5QGwh6@(asA%sALLWD(xNQ6;@RD@uJfrNyFkc0q*0)+*I2!#=a6onv#L4`zxP=$bniiH7&1cnfXDTY9X0Eh*M5r`CsL5M"
        "_%P>7<40f_{OK#66EB8pgwT8e^-qKW~K1ds`k5Rej(6_6N^B#=OmLXbs}NRUyGRFGhhfslldkdOe81(6Yv6p=xZM3GRDT9E;g1d<SvK$51C0"
        "F(lh1(XPs5tI~^Ae2FrM3hjJfRvV$0hI)m5S2icn3bWG0G39UWR?M#1eg$*CYV5&sh9wnNtsfakeUFX1)vI`6rduYDxg82M4(WhqM)jvK%r%"
        "!0-_3{BBCgwDx!j-h@y(3sG<R+1f&q8K%|MJq@)0)8KqIC3aBWkqNr4<hN%du3aTKgBC05=h^nfp"
    ),
    "IQ3_XXS": (
        "000621OO2L695+gAOIo&F#tjUa{zS!0RaO65CIYaAps=;Faa_FK><_&Z~*`U0s;gA5dt6rA_6f2GXggPQ36*2bpinc2LliT5(6aza03$rHv~"
        "ikR|Inebp!zg2L&<(QUx^zWCjoi6bBXuLkD380T2Ta5D*d&ArK=FFc2~jG!RD+P!IqS0ud1rAQ2)F0TKfe5E2p+ArdeWauNU&0uvw;F%w1;W"
        ")lGv1r$&eAQdDPMip@t1r{O~Ko<ZY0w56}6CfZUA|NIpF(5)90U-k+1tAb25+NZWFd<_hXCZJQ03re+5h52NAR;0nHzGhHRU!c+5F->La3gd"
        "hH6&9c10^RVK_zr00Ve||7AHj~0Wc6S5-=e!BQQ`fWiWCu05JkFATcp9L@`D&0Wt$J5Hck)QZjNf5i>J0Ff>Orax?%n1~nozRW%egHa256Gd"
        "Ey21V9%+H9$8&Q$SZhbU`3OH$p%{U_xd>2SY_e1Vm9pWJD!JLq%{!1xFA^5=Ssc5>P=<a8LkI22mzaRZ$dDGE#C<0#j2{5L6>nCscA&0#z|p"
        "P*x;YLRTbUL|{f>WMCm-VPO|yWMVL5He*C&1!YoYGiC#4A!h?{1#ky&5O6YZQg9}5KyeasMRHPd0CN>{Gjm{bA#_1>0CfU&By})$"
    ),
    "IQ3_S": (
        "000310ssX72LKQN5dabZ6aW?gAOIl%B>*!3KmbAjMF2+tQ2<i_U;ttOaR77xcK`qZ0RaL51OX5M5djqeAORx*Cjl`5H338cVF6_UasdDW0Rj"
        "aA2LccR69N_jAp#`=Fak6JLIOnsM*>j-Qvz@Ta{>bc5d#$iAOj);F#|ILHUmThPy<o}X9IBqbprqd69g9oAp|4@G6X;bLj+L-a0CJc1O*@kA"
        "_XP|GX+5fMFmF%W(9Kv1_luZ69zE`QU-Ab00#mG1P34oA_pc1GY3!yR0jYM0T2QZ1P~Aq5fBp)6%ZE?AP^!DF%UEmHV{-0RuEwjau5I!0TBZ"
        "c1`!Yu6cHg2FcC8mK@m_9QW0<wb`by)5)u^>7ZM;6BoZ<bKoUa|RT5wlauNX(1QQ1n5EBy<ArmJPFcUNrK@(yVa1#R*1r!n#6cjNOGZaD;Mi"
        "fvKR1^Uf5ET;@Ar&wcG8Iu3AQmJRCl*8&Miv1V0~Zh%5*HyCH5Wk_Vi#~103ZP%10V$;2Otn25+D>H79b%YBOoUrFd#A@K_EjQMIcZhQXpp_"
        "a3FIabszvC0wE9~6CoENA|WLqF(EV|LLpHh0U`t<2O=RNBO)*&HzGkIQzBO)aUygg03!k;1tSq7A|oUtF(Wf0LL*QkW+MS42P7aQBP22;H6%"
        "eKawK&m1SJtAA|*E^KqXTpa3ugH0wxD0AtqHOVI~D95ho@mFegJNP$vQ~5ik=l6)+btA}}#9GcYwULNG)yM=((^V=!?r0WkwH1u+ycAu%H{K"
        "rvu3axr!>05TFXATlyCG%`>!0W%OY6f+?+BQqy6Ff&0jLo-J+RWoxl12hpd7BnI>F*H&%U^HYj0W}ac5;Y|?GBrdsRyA`q7B)dP0XG9TAU7g"
        "6H8%i21V9o%AV4HQCqOblK|oMIa6ke<2SE`*6G0+DFhMmzLqSnNRY3tl140l&6+$6GGeST@S3+V!a6$w_5knJ0AVVTUF+(*&07L>rBt$nvKt"
        "ypw1w{u%Aw^<E6Gk*fU`7x}6-O{fLq}0Z0#Fc86i^~iKu|<bM^I8wW>9oc0Z{`{1yK@FAyG0>a!~+M5mF;kFj6*BQ&Iv`2U8GJCsRaIQB!48"
        "b5j9S1XLhYGE_!X5>+NuQB_k_LRJD-1Xm(g5nvNw6<{%7Ghkp~0AV0uCt+k^5@IxBLSj{7Vq$P&0AmzmA!9&eC1gWnVq^ei17$R2U}XhnKxP"
        "qV6K4Q$1aJp%AaEjZHgG_2RB&Q&0&x*>BymG=MR5Ug1ac5^7IGnSFmh3H0&_BRHFHyQ0dxg)6LcVSP;?@7LUjUmF?IlV"
    ),
}


def _unpacked(name: str) -> NDArray[np.uint8]:
    packed = np.frombuffer(base64.b85decode(_PACKED[name]), np.uint8)
    bits, width = (2, 8) if name.startswith("IQ2") else (4, 4)
    places = packed[:, None] >> np.arange(0, 8, bits, dtype=np.uint8) & np.uint8((1 << bits) - 1)
    return places.reshape(-1, width)


GRIDS = {name: _unpacked(name) for name in _PACKED}
