{{/* Prefix of all resource names, short enough for the suffixes that Ray and StatefulSets append. */}}
{{- define "gammaray.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- $full := .Release.Name -}}
{{- if not (contains $name .Release.Name) -}}
{{- $full = printf "%s-%s" .Release.Name $name -}}
{{- end -}}
{{- $full = default $full .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $full) -}}
{{- fail (printf "fullnameOverride: needed, since %q cannot begin the names of Services and of the RayService: got release %q, allowed: a-z, 0-9 and -, from a letter on" $full .Release.Name) -}}
{{- end -}}
{{- $full -}}
{{- end -}}

{{/* Labels of every resource. */}}
{{- define "gammaray.labels" -}}
{{- $chart := printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" -}}
{{- $labels := dict "helm.sh/chart" $chart "app.kubernetes.io/name" .Chart.Name "app.kubernetes.io/instance" .Release.Name -}}
{{- $_ := set $labels "app.kubernetes.io/version" (.Values.image.tag | default .Chart.AppVersion) -}}
{{- $_ := set $labels "app.kubernetes.io/managed-by" .Release.Service -}}
{{- merge $labels .Values.commonLabels | toYaml -}}
{{- end -}}

{{/*
Selector of the pods of a component: (dict "root" $ "component" name). Ray pods must not have the label
app.kubernetes.io/name: KubeRay selects the head by its own value of it.
*/}}
{{- define "gammaray.selector" -}}
app.kubernetes.io/part-of: gammaray
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{/* Selector of exactly the Ray pods of the release. */}}
{{- define "gammaray.raySelector" -}}
app.kubernetes.io/part-of: gammaray
app.kubernetes.io/instance: {{ .Release.Name | quote }}
gammaray.io/ray: "true"
{{- end -}}

{{/* A gammaray image: (dict "root" $ "name" "orchestrator", "worker-gpu" or "worker-cpu"). */}}
{{- define "gammaray.image" -}}
{{- $image := .root.Values.image -}}
{{- $own := get $image (camelcase .name | untitle) -}}
{{- $tag := $own.tag | default $image.tag | default .root.Chart.AppVersion -}}
{{- if not (or $own.repository $image.registry) -}}
{{- $index := ternary "--build-arg TORCH_CPU_INDEX=URL " "" (eq .name "worker-cpu") -}}
{{- fail (printf "image.registry: needed, since no image of gammaray is published. Build each image in use and push it:\n\n  docker build -f docker/Dockerfile --target %s -t REGISTRY/gammaray-%s:%s %s.\n  docker push REGISTRY/gammaray-%s:%s\n\nthen give --set image.registry=REGISTRY, or image.%s.repository for this image alone" .name .name $tag $index .name $tag (camelcase .name | untitle)) -}}
{{- end -}}
{{- $own.repository | default (printf "%s/gammaray-%s" (trimSuffix "/" $image.registry) .name) -}}
{{- if $own.digest }}@{{ $own.digest }}{{ else }}:{{ $tag }}{{ end -}}
{{- end -}}

{{- define "gammaray.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "gammaray.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{/* Names, ports and environment, generated from the Python package. */}}
{{- define "gammaray.generated" -}}
{{- .Files.Get "files/gammaray.yaml" -}}
{{- end -}}

{{/* The Serve configuration before this release's values. */}}
{{- define "gammaray.serve" -}}
{{- .Files.Get "files/serve.yaml" -}}
{{- end -}}

{{/* "true" if any pool autoscales. */}}
{{- define "gammaray.scales" -}}
{{- if or (include "gammaray.workersScale" .) (contains ":" (toString .Values.orchestrator.replicas)) -}}
true
{{- end -}}
{{- end -}}

{{/* "true" if a pool of workers autoscales. */}}
{{- define "gammaray.workersScale" -}}
{{- if or (contains ":" (toString .Values.draft.workers)) (contains ":" (toString .Values.target.workers)) -}}
true
{{- end -}}
{{- end -}}

{{/* Secret with the certificate of Ingress or Gateway; empty: no TLS. */}}
{{- define "gammaray.tlsSecret" -}}
{{- if .Values.tls.secretName -}}
{{- .Values.tls.secretName -}}
{{- else if .Values.tls.certManager.enabled -}}
{{- include "gammaray.fullname" . }}-tls
{{- end -}}
{{- end -}}

{{/* Secret with a certificate for mutual TLS: (dict "root" $ "holder" "orchestrator" or "worker"). */}}
{{- define "gammaray.workerTlsSecret" -}}
{{- $given := get .root.Values.workerTls (printf "%sSecret" .holder) -}}
{{- default (printf "%s-%s-tls" (include "gammaray.fullname" .root) .holder) $given -}}
{{- end -}}
